"""The picture of a sweep: what is drawn in which color, when rows are missing."""

from benchmarks.attention.plot import colors_of, draw_dtype
from benchmarks.attention.rows import Row


def row(batch, context):
    return Row(
        part="decode",
        dtype="float32",
        threads=1,
        layout="NHD",
        block_size=16,
        batch=batch,
        context=context,
        nbytes=2**28,
        yardstick="read",
        best=1.2,
        median=1.3,
        yardstick_best=1.0,
        yardstick_median=1.1,
        repetitions=15,
        rejected=0,
        is_complete=True,
    )


def test_batch_keeps_its_color_when_others_are_missing():
    from matplotlib.figure import Figure

    colors = colors_of((64, 1, 16))
    assert len(set(colors.values())) == 3
    panels = Figure().subplots(2)
    draw_dtype(panels, "float32", [row(16, context) for context in (1024, 4096)], colors)
    handles, names = panels[0].get_legend_handles_labels()
    assert handles[names.index("batch 16")].get_color() == colors[16]
