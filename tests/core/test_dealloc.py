"""Nothing is printed, raised or crashed when the interpreter ends with pools and plans in any state."""

import subprocess
import sys

import pytest

SETUP = """
import kvpool
pool = kvpool.Pool(64, 4, in_order={in_order})
plan = kvpool.Plan(pool, 4, 16)
handle = pool.open()
pool.step(plan, [handle], 9)
child = pool.fork(handle)
"""
ENDS = {
    "everything alive": "",
    "pool dropped first": "del pool",
    "plan dropped first": "del plan",
    "arrays outlive both": "tables = plan.block_tables; del plan, pool; tables.sum()",
    "in a cycle": "cycle = [pool, plan]; cycle.append(cycle); del pool, plan, cycle",
    "shut down": "pool.shutdown()",
    "shut down twice": "pool.shutdown(); pool.shutdown(); plan.seq_lens.sum(); del pool, plan",
    "deferred close": "pool.defer_close(handle)",
    "a manager on native kernels": """
from kvpool.config import KVSpec
from kvpool.adapters.block_manager import KVBlockManager
manager = KVBlockManager(KVSpec(1, 1, 16, "float32", 4), 8, backend="cpu")
slots = manager.step([manager.new_sequence(4).seq_id], 4)
""",
    "closed at exit": "import atexit; atexit.register(lambda: pool.close([handle]))",
    "constructors that failed": """
for wrong in ((0, 4), (8, 0), (8, "4"), (2**40, 4)):
    try:
        kvpool.Pool(*wrong)
    except (ValueError, TypeError):
        continue
    raise SystemExit(f"Pool{{wrong}} was accepted")
for wrong in (-1, "4", None):
    try:
        kvpool.Plan(pool, wrong)
    except (ValueError, TypeError):
        continue
    raise SystemExit(f"Plan(pool, {{wrong!r}}) was accepted")
""",
}


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("end", list(ENDS))
def test_interpreter_ends_in_silence(end, in_order):
    code = (SETUP + ENDS[end]).format(in_order=in_order)
    command = [sys.executable, "-W", "error", "-X", "dev", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stderr, result.stdout) == (0, "", "")
