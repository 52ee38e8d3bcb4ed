"""Importing kvpool is cheap and brings in no framework."""

import json
import statistics
import subprocess
import sys

IMPORT_MS_MAX = 60  # beside numpy, which takes 90 to 200 itself, as fast as the machine is
TIME_IMPORT = """
import time
import numpy
start = time.process_time()
import kvpool
print((time.process_time() - start) * 1e3)
"""
LIST_MODULES = "import json, sys, kvpool; print(json.dumps(list(sys.modules)))"
FRAMEWORKS = {"jax", "kvpool_backends", "matplotlib", "mlx", "mlx_lm", "rich", "torch", "transformers"}


def output_of(code):
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def test_import_takes_at_most_60_ms_more_than_numpy():
    """CPU time, median of five; a first run fills the file cache."""
    output_of(TIME_IMPORT)
    times = [float(output_of(TIME_IMPORT)) for _ in range(5)]
    assert statistics.median(times) <= IMPORT_MS_MAX, times


def test_import_brings_in_numpy_and_no_framework():
    modules = {module.partition(".")[0] for module in json.loads(output_of(LIST_MODULES))}
    assert "numpy" in modules
    assert not modules & FRAMEWORKS
