"""`StepArrays.of_group` and `rows_of`: what a backend sees of a plan with layer groups."""

import numpy as np
import pytest

from kvpool import Group, Plan, Pool
from kvpool.protocol import StepArrays


@pytest.mark.parametrize("seed", range(6))
def test_step_arrays_of_a_group_name_the_blocks_and_slots_of_its_table(seed):
    """Beside `table`: the blocks that are kept, every one from the first held one on, and slots of the new tokens."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    groups = [Group.full(columns=2), Group.window(7, columns=3, arena=1, num_blocks=400, block_size=8), Group.chunk(12)]
    groups.append(Group.window(11, keep=6))
    pool = Pool(300, 4, max_seqs=8, lookahead=int(rng.integers(0, 6)), groups=groups)
    plan = Plan(pool, 4, 128, formats=("block_tables", "seq_lens", "slot_mapping", "cu_q_lens"), table_width=32)
    handles = pool.open(), pool.open(), pool.open()
    for _ in range(25):
        new = rng.integers(0, 5, len(handles))
        pool.step(plan, np.array(handles), new)
        for number, (group, arrays) in enumerate(zip(groups, plan.groups, strict=True)):
            size = group.block_size or 4
            for column in range(group.columns):
                step, slots = StepArrays.of_group(plan, number, column), []
                for row, handle in enumerate(handles):
                    blocks, length = pool.table(handle, number)[:, column], pool.num_tokens(handle)
                    first = int(arrays.kv_starts[row]) // size
                    kept = min(first, -(-group.keep // size))
                    held = [*blocks[:kept].tolist(), *blocks[first : -(-length // size)].tolist()]
                    assert step.seq_lens[row] == length - (first - kept) * size
                    assert step.block_tables[row, : len(held)].tolist() == held
                    places = range(length - int(new[row]), length)
                    slots += [int(blocks[place // size]) * size + place % size for place in places]
                assert step.slot_mapping.tolist() == slots and not len(step.copies)
                assert step.cu_q_lens.tolist() == [0, *np.cumsum(new)]
                some = rng.permutation(3)[: rng.integers(1, 4)]
                part = StepArrays.rows_of(step, some)
                assert np.array_equal(part.block_tables, step.block_tables[some])
                assert part.seq_lens.tolist() == [step.seq_lens[row] for row in some]
                cuts = step.cu_q_lens
                assert part.slot_mapping.tolist() == [s for row in some for s in slots[cuts[row] : cuts[row + 1]]]
                assert part.cu_q_lens.tolist() == [0, *np.cumsum(new[some])]
        pool.done(plan)
    assert max(int(arrays.kv_starts.max()) for arrays in plan.groups) > 8
