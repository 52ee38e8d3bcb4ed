"""Rows of README.md as programs: each call is made on a pool and on its plain model, which say and show the same.

Sequences, pins and blocks have names, and a letter of a prompt is a token. `!` marks a call that both must refuse; p1
and p2 are other plans than the first; `|` begins anew. At the end everything is closed and given back.
"""

import pytest

from kvpool import Plan, Pool
from kvpool.testing import ModelPlan, ModelPool

FORMATS = ("block_tables", "seq_lens", "positions", "slot_mapping")
MARKS = {"prefix_cache": False}  # then callers mark what is cached
PROGRAMS = {  # id: (blocks, options of the pool, program)
    "a2": (16, {}, "open a; step a 7; done; fork a b; step b,a 3; done; close a,b"),
    "a10": (16, {}, "open a; step a 12; done; cut a 7; cut a 6; cut a 5; cut a 4; cut a 3; cut a 1; cut a 0"),
    "a14": (16, {}, "open a; step a 10; done; fork a b; fork a c; fork a d; close a,b; close c,d; alloc x 15"),
    "b3": (16, MARKS, "open a; step a 8; done; fork a b; fork b c; mark a; close a,b; close c"),
    "b4": (8, {}, "open a 8; close a | open a 8; reserve a 12; close a; done | open a 8; step a 9; close a; done"
           "| open a; step a 9; fork a b; close b; close a; done | open a; step a 9; rollback; close a"
           "| open a 8; alloc x 5; !step a 12; close a"),
    "b5": (16, {}, "open a; step a 9; close a; done"),
    "b6": (16, {}, "open a 8; step a 8; close a; rollback; step 0 0 p1; done p1"),
    "b7": (16, {}, "open a; open b; step a 8; step b 8 p1; done p1; close b,a; done"),
    "b8": (16, {}, "open a; step a 6; done; fork a b; step b 1; close a,b; done"),
    "b9": (8, {}, "open a; step a 9; rollback; step a 9; rollback; step a 28; done"),
    "b11": (5, MARKS, "open a; step a 16; done; mark a; close a; open b; step b 16; done; close b; open c; step c 9"),
    "b12": (16, {}, "serve a aaaabbbb; close a; pin p aaaabbbb; pin q aaaabbbb; pin r aaaa; unpin p; unpin r; unpin q"),
    "c1": (16, {}, "open a; step a 4; step a 4 p1; done; close a; evict 16; alloc x 13; !alloc y 1; done p1; alloc y 2"
           "| open a; step a 4; step a 4 p1; close a; done; evict 16; alloc x 13; !alloc y 1; done p1; alloc y 2"),
    "c2": (16, {}, "open a; step a 3; step a 1 p1; done; !commit a aaaa; done p1; commit a aaaa; match aaaab"
           "| open a; step a 8; step a 1 p1; done; !drop a 0; !compact a 5; rollback p1; step a 1; done; drop a 0"),
    "c3": (16, {}, "open a; step a 8; !cut a 0; done; cut a 0"),
    "c4": (4, {}, "open a; open b; step a 8; step b 1 p1; close a; step b 3 p2; !step b 1; done; done p1; step b 1"),
    "c7": (4, {}, "serve a aaaabbbb; close a; pin p aaaabbbb; !open b jjjjjjjj; table p; unpin p; open b jjjjjjjj"),
    "c9": (16, {}, "open a aaaabbbbcccc; step a 6; done; commit a aaaabb; close a; match aaaabbbb; alloc x 14"),
    "c10": (4, {}, "open a aaaabbbbcccc; step a 12; done; commit a aaaabbbbcccc"),
    "c11": (16, {}, "serve a aaaabbbb; close a; evict 1; match aaaabbbbcccc; serve b aaaacccc; match aaaabbbbc"),
    "c12": (16, {}, "serve a aaaabbbb; close a; serve b cccc; close b; match ccccbbbba; serve a ddddeeeeaaaa; close a;"
            "serve a eeeeffffbbbb; close a; match ddddeeeebbbba; match eeeeffffbbbba; match eeeebbbba"),
    "c15": (4, {}, "serve a aaaa; close a; open b aaaabbbb; evict 16; !open c jjjjjjjjjjjj"),
    "c17": (2, {}, "serve a aaaa; close a; open b; step b 1; match aaaab; done; step b 1; done; close b; match aaaab"),
    "c18": (16, {"max_seqs": 1}, "open a; step a 8; done; close a; open b; step b 8; done; !table a"),
    "d1": (32, {}, "open a; step a 5; done; fork a b; fork a c; fork a d; step a,b,c,d 1; done; close a,b,d;"
           "fork c e; fork c f; fork c g; step c,e,f,g 1; done"),
    "d2": (16, {}, "open a; step a 6; done; fork a b; fork a c; step a,b,c 1; reset; open a; step a 3; done"),
    "d6": (16, {}, "open a; open b; step a 10; done; step a 0; done; cut a 2; step b 8; done; step a 1; done"),
    "e1": (16, {}, "open a; step a 3; done; step a 1; done; step a 1; done | open a; step a 4; done; step a 1; done"
           "| open a; step a 7; done; step a 1; done | open a; step a 8; done; step a 1; done | open a; step a 9; done"
           "| serve a aaaabbbbcccc; close a; open b aaaabbbbcccc; step b 4; done; commit b cccc; step b 4; done;"
           "commit b gggg; match aaaabbbbccccggggh"),
    "e2": (16, {}, "serve a aaaabbbbcccc; match aaaa; match aaaab; match aaaabbb; match aaaabbbb; match aaaabbbbc"),
    "e4": (16, {}, "serve a aaaabbbb; reserve a 3; done; cut a 8; match aaaabbbbcccc"),
    "e8": (5, MARKS, "alloc x 2; free x; open a; step a 8; done; mark a; close a; open b; step b 16"),
    "e10": (16, {}, "open a; step a 12; done; compact a 6; step a 5; done; !cut a 11; !cut a 18; cut a 14; step a 1"),
    "e13": (16, {}, "open a; open b; step a,b 3; done; reserve a 1; done; step b 1; done; reserve a 6; done; step b 5"
            "| open a; open b; step a,b 4; done; reserve a 4; done; step b 4"
            "| open a; open b; reserve a 13; step b 13 p1"),
    "f1": (12, {"reserved_blocks": 5}, "alloc x 7; free x; reset; alloc x 7; !alloc y 1"),
    "f2": (12, {"reserved_blocks": 3}, "evict 12; alloc x 9; !alloc y 1; free x"),
    "h4": (6, {}, "open a; open b; open c; !step a,b,c 8; step a,b 8"),
    "h5": (8, {}, "open a; open b; step a,b 12; done; !step b 8; close a; step b 8; done"),
    "i5": (64, {"_hash_bits": 0}, "serve a aaaabbbb; serve b bbbbcccc; serve c ccccaaaa; match aaaac; match aaaabbbbc;"
           "match aaaacccca; match bbbbaaaac; match bbbbcccca; match ccccbbbba; match ddddd; pin p aaaabbbb"),
}  # fmt: skip


class Side:
    """A pool with plans, and what a program has named."""

    def __init__(self, make_pool, make_plan, blocks, options):
        self.pool = make_pool(blocks, **{"block_size": 4, "prefix_cache": True, "seed": 1, "max_seqs": 16, **options})
        self.plans = [make_plan(self.pool, 8, 64, formats=FORMATS) for _ in range(3)]
        self.handles, self.blocks = {}, {}

    def call(self, words):
        """Make a call. Returns what it gave, as plain values, or the class of what it raised."""
        plan = self.plans[int(words.pop()[1]) if words[-1] in ("p1", "p2") else 0]
        name, *given = [*words, None, None][:3]
        rows = [self.handles[row] for row in (given[0] or "").split(",") if row in self.handles]
        tokens, n = [ord(letter) for letter in given[-1] or ""], int(given[-1]) if f"{given[-1]}".isdigit() else None
        pool, blocks = self.pool, self.pool.blocks
        before = self.seen()
        try:
            if name in ("step", "reserve"):
                getattr(pool, name)(plan, rows, n)
                shown = [getattr(plan, array) for array in (*FORMATS, "copies")]
                return [array.tolist() for array in shown]
            if name in ("done", "rollback"):
                return getattr(pool, name)(plan)
            if name in ("open", "serve", "pin"):
                handle = pool.prefix.pin(tokens) if name == "pin" else pool.open(tokens if n is None else n)
                self.handles[given[0]] = handle
                if name == "serve":
                    cached = pool.num_tokens(handle)
                    pool.step(plan, [handle], len(tokens) - cached)
                    pool.done(plan)
                    pool.prefix.commit(handle, tokens[cached:])
                return pool.num_tokens(handle)
            if name == "fork":
                self.handles[given[1]] = int(pool.fork(rows[0])[0])
                return None
            if name == "alloc":
                self.blocks[given[0]] = blocks.alloc(n)
                return self.blocks[given[0]].tolist()
            return {
                "close": lambda: pool.close(rows),
                "unpin": lambda: pool.prefix.unpin(rows[0]),
                "cut": lambda: pool.truncate(rows[0], n),
                "compact": lambda: pool.compact(rows[0], n),
                "drop": lambda: pool.evict_blocks(rows[0], [n]),
                "commit": lambda: pool.prefix.commit(rows[0], tokens),
                "match": lambda: pool.prefix.match([ord(letter) for letter in given[0]]),
                "mark": lambda: blocks.mark_cached(pool.table(rows[0])),
                "table": lambda: pool.table(rows[0]).tolist(),
                "free": lambda: blocks.free(self.blocks.pop(given[0])),
                "evict": lambda: blocks.evict(int(given[0])),
                "reset": pool.reset,
            }[name]()
        except Exception as error:  # the other side must raise the same
            assert self.seen() == before, f"{words} raised and changed the pool: {error}"
            return type(error)

    def seen(self):
        """All that can be read."""
        pool, live = self.pool, [handle for handle in self.handles.values() if self.pool.is_open(handle)]
        rows = [(pool.table(row).tolist(), pool.num_tokens(row), pool.kv_len(row), pool.capacity(row)) for row in live]
        counts = [pool.blocks.refcount(block) for block in range(pool.stats().reserved, pool.stats().num_blocks)]
        return rows, counts, tuple(pool.stats()), pool.options.prefix_cache and tuple(pool.prefix.stats())


def run(program, blocks, options, make=(Pool, Plan)):
    """Run a program on both sides."""
    for text in program.split("|"):
        plain = {name: value for name, value in options.items() if name != "_hash_bits"}
        sides = [Side(*make, blocks, options), Side(ModelPool, ModelPlan, blocks, plain)]
        for call in text.split(";"):
            one, other = (side.call(call.strip().lstrip("!").split()) for side in sides)
            assert one == other, f"{call}: the pool gave {one}, the model {other}"
            assert isinstance(one, type) == call.strip().startswith("!"), f"{call}: {one}"
            assert sides[0].seen() == sides[1].seen(), f"after {call.strip()}"
            sides[0].pool.check()
        for pool, side in [(side.pool, side) for side in sides]:
            pool.close([handle for handle in side.handles.values() if pool.is_open(handle)])
            for plan in side.plans:
                if plan.is_pending:
                    pool.done(plan)
            for block in side.blocks.values():
                pool.blocks.free(block)
            assert pool.stats().used == pool.stats().limbo == pool.stats().pending == 0
            pool.shutdown()


@pytest.mark.parametrize("row", PROGRAMS)
def test_program(row):
    blocks, options, program = PROGRAMS[row]
    run(program, blocks, options)


class RollbackIsDone(Pool):
    """A pool with a bug: what was given up stays."""

    def rollback(self, plan):
        self.done(plan)


def test_program_on_a_pool_with_a_planted_fault_is_found():
    with pytest.raises(AssertionError, match="after rollback"):
        for blocks, options, program in PROGRAMS.values():
            run(program, blocks, options, (RollbackIsDone, Plan))
