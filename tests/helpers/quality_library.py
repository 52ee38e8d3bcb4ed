"""Forty sources that are alike, in place of Python's library: what tests of `benchmarks.quality` train and ask on."""

from benchmarks.quality import corpus


def read(folder, functions=60):
    """The corpus of a folder that is written first: the same bytes in each source but the first line."""
    for number in range(40):
        body = "def f(x):\n    return x + 1\n" * functions
        (folder / f"module_{number}.py").write_text(f"# {number}\n{body}")
    return corpus.read(folder, least=100)
