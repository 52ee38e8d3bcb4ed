"""Traces made by hand for `benchmarks.replay`, and the output of its command."""

import numpy as np

from benchmarks.command import main
from benchmarks.replay import Trace
from benchmarks.replay import __main__ as command


def make_trace(requests, block_size=4):
    """A trace of (prompt, output, ids) per request."""
    prompts, outputs, ids = zip(*requests, strict=True)
    return Trace(
        name="made here",
        block_size=block_size,
        prompts=np.array(prompts),
        outputs=np.array(outputs),
        ids=np.array([value for row in ids for value in row], np.int64),
        id_offsets=np.cumsum([0, *map(len, ids)]),
        timestamps=np.zeros(len(ids), np.int64),
        sessions=np.full(len(ids), -1),
    )


def output(capsys, *argv):
    """Run the command, which must succeed; return what it printed."""
    assert main(command, argv) == 0
    out, err = capsys.readouterr()
    assert err == ""  # no progress bar where nobody watches
    return out
