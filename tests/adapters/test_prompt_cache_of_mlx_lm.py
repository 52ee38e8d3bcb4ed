"""mlx-lm's own tests of its prompt cache and of its server, from the source distribution, on `PromptCache`."""

import importlib.metadata
import subprocess
import sys
import tarfile

import pytest

pytest.importorskip("mlx_lm")
pytestmark = pytest.mark.long

CLASSES = (
    "TestLRUPromptCache",
    "TestServer",
    "TestServerWithDraftModel",
    "TestServerWithoutKVCacheQuantization",
)
# These need the model that they name: its samples repeat, and its files are in the cache of a hub. A third one, of
# quantized caches, reads the cache while the server may still insert: `tests/mlx_lm/test_mlx_lm_server.py` waits.
OTHERS = ("TestServer.test_handle_completions", "TestServer.test_handle_models")
RUNNER = """
import sys, unittest
import mlx_lm.utils
from mlx_lm import server
from kvpool.adapters.mlx_lm import tiny
from kvpool.adapters.prompt_cache import PromptCache

mlx_lm.utils.load = lambda *names, **options: tiny.make()
{fault}
server.LRUPromptCache = lambda max_size=10, max_bytes=1 << 63: PromptCache(max_bytes, max_size=max_size)
import test_server

wanted = unittest.TestSuite()
for name in {classes}:
    for case in unittest.defaultTestLoader.loadTestsFromTestCase(getattr(test_server, name)):
        if not case.id().endswith({others}):
            wanted.addTest(case)
result = unittest.TextTestRunner(verbosity=2).run(wanted)
sys.exit(not (result.wasSuccessful() and result.testsRun >= 17 and not result.skipped))
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The tests of the installed release, and what they import besides."""
    folder, pip = tmp_path_factory.mktemp("mlx_lm"), [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    release = f"mlx-lm=={importlib.metadata.version('mlx-lm')}"
    for arguments in (
        ["download", release, "--no-deps", "--no-binary", "mlx-lm", "--dest", folder],
        ["install", "requests", "--target", folder / "more"],
    ):
        ended = subprocess.run([*pip, *map(str, arguments)], capture_output=True, text=True, check=False)
        if "Could not find a version" in ended.stderr or "Connection" in ended.stderr:
            pytest.skip(f"no package index: {ended.stderr.splitlines()[-1]}")
        assert ended.returncode == 0, ended.stderr
    (archive,) = folder.glob("mlx_lm-*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    (tests,) = folder.glob("mlx_lm-*/tests")
    return [folder / "more", tests]


def run(sources, fault=""):
    paths = f"import sys\nsys.path += {[str(path) for path in sources]}\n"
    script = paths + RUNNER.format(fault=fault, classes=CLASSES, others=OTHERS)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


def test_the_tests_of_mlx_lm_pass_on_it(sources):
    ended = run(sources)
    assert ended.returncode == 0, ended.stderr[-4000:]


def test_the_tests_of_mlx_lm_find_a_fault(sources):
    ended = run(sources, "PromptCache._trim_sequences = lambda self, count: None")
    assert ended.returncode != 0 and "FAILED" in ended.stderr
