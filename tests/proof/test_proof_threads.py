"""What `proof.threads` runs, without ThreadSanitizer: `make test-metal` and `make proof` run it with."""

import subprocess
import sys

import pytest
from proof.callers import Wrong

from kvpool import Pool
from proof import SHORT, freethreaded_run, threads, threads_run
from tests.verify.builds import ROOT


def test_calls_of_many_threads_on_one_pool_are_all_made():
    assert "1 pool of all, 4" in threads_run.pool_of_all(0)


def test_pool_that_does_something_else_is_detected(monkeypatch):
    class Careless(Pool):
        def num_tokens(self, handle):
            return super().num_tokens(handle) // 2

    monkeypatch.setattr(
        freethreaded_run, "new_pool", lambda turn, **more: Careless(200, 4, max_seqs=40, max_blocks_per_seq=12, **more)
    )
    with pytest.raises(Wrong, match="num_tokens"):
        threads_run.pool_of_all(0)


def test_machine_without_setarch_is_reported(monkeypatch):
    monkeypatch.setattr(threads.shutil, "which", lambda name: None)
    figure = threads.measure(SHORT)
    assert not figure.holds and "refused here" in figure.notes


@pytest.mark.long
def test_driver_fits_the_core_of_today(tmp_path):
    """It is compiled only where ThreadSanitizer runs; what it names of the core is looked up here."""
    command = [sys.executable, "-m", "cython", "-3", "proof/threads_driver.pyx", "-o", str(tmp_path / "driver.c")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
