"""What a fuzz run is made of: the shape of its pool, the weights of its operations, its appetite; all from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from kvpool.groups import Group

KINDS = ("full", "window", "chunk", "state")
OPERATIONS = (
    *("open", "open_prompt", "step", "reserve", "fork", "truncate", "close", "close_batch", "defer_close"),
    *("done", "done_any", "execute", "rollback", "commit", "match", "pin", "evict", "flush"),
    *("alloc", "incref", "decref", "mark_cached", "touch", "drain_evicted", "can", "reset", "misuse"),
    *("unshare", "compact", "evict_blocks", "read", "events", "ranks", "load", "loaded"),
)
#: What has to be seen to believe that a run went everywhere.
STATES = (
    *("copies", "replaced", "rollbacks", "rollbacks_of_executed", "late_plans", "calls_with_limbo", "limbo_hits"),
    *("prefix_hits", "evictions", "out_of_blocks", "partial", "refusals", "closed_while_pending", "done_out_of_order"),
    *("compactions", "held_back", "contradictions", "namespaces_forgotten", "loaded", "loaded_in_vain"),
)
#: The same of pools with layer groups: what only they meet, and all of it.
OF_GROUPS = ("entries_let_go", "states_replaced", "truncations_refused")
GROUP_STATES = (
    *("copies", "rollbacks", "rollbacks_of_executed", "late_plans", "calls_with_limbo", "out_of_blocks", "partial"),
    *("refusals", "closed_while_pending", "done_out_of_order", "evictions", *OF_GROUPS),
)
#: Usual weights; a run draws its own around them, and some are off.
WEIGHTS = {
    **{"open": 6, "open_prompt": 8, "step": 40, "reserve": 3, "fork": 6, "truncate": 4, "close": 8},
    **{"close_batch": 1, "defer_close": 1, "done": 18, "done_any": 4, "execute": 4, "rollback": 5, "commit": 10},
    **{"match": 1, "pin": 2, "evict": 1, "flush": 1.5, "alloc": 3, "incref": 3, "decref": 5, "mark_cached": 4},
    **{"touch": 4, "drain_evicted": 1, "can": 2, "reset": 0.1, "misuse": 2},
    **{"unshare": 3, "compact": 5, "evict_blocks": 2, "read": 2, "events": 1, "ranks": 0.05},
    **{"load": 3, "loaded": 4},
}
ALWAYS = ("open", "step", "close", "done")  # a program without these goes nowhere
PREFIX_ONLY = ("open_prompt", "commit", "match", "pin", "flush", "events", "ranks")
BARE_ONLY = ("mark_cached", "touch", "drain_evicted")
EVICTIONS = ("unshare", "compact", "evict_blocks")
SPACES = (b"", b"a", b"b")
CROWDS = 0.15  # of the runs with a prefix cache: many namespaces
_FORMATS = ("block_tables", "seq_lens", "slot_mapping", "positions", "cu_q_lens")


def space_name(space: int) -> bytes:
    """The namespace of a number."""
    return SPACES[space] if space < len(SPACES) else b"%d" % space


@dataclass(frozen=True, slots=True)
class Shape:
    """One run: `pool` are keyword arguments of `kvpool.Pool`, `dice` has 256 faces shared out to `OPERATIONS`."""

    seed: int
    pool: dict[str, Any] = field(hash=False)
    dice: tuple[int, ...]
    plans: int = 3
    max_rows: int = 8
    max_tokens: int = 64
    appetite: int = 3  # most new tokens of a row
    alphabet: int = 2  # tokens that a model may say
    spaces: int = 3  # namespaces of prompts
    hot: int = 1 << 30  # sequences that calls are mostly about
    full: bool = True  # check everything after every call
    counters: bool = True  # what `stats` says, of the prefix cache too

    @property
    def watermark(self) -> int:
        """Blocks that `open` leaves."""
        return int(self.pool["watermark"])


def draw_shape(seed: int, num_blocks: int | None = None, block_size: int | None = None) -> Shape:
    """The run of a seed, checked after every call: pools of 4 to 64 blocks."""
    rng = random.Random(seed)
    blocks = num_blocks or rng.choice([rng.randint(4, 12), rng.randint(4, 28), rng.randint(16, 64)])
    size = block_size or rng.choice([1, 2, 2, 3, 4, 4, 5, 7, 8, 16])
    reserved = rng.choice([0, 1, 1])
    prefix = rng.random() < 0.5
    pool = {
        "num_blocks": blocks,
        "block_size": size,
        "max_seqs": rng.choice([2, 4, 6, 10, 16]),
        "max_blocks_per_seq": rng.choice([None, min(blocks - reserved, 8), 3]),
        "reserved_blocks": reserved,
        "watermark": min(rng.choice([0, 0, 0, 1, 3]), blocks - reserved),
        "in_order": rng.random() < 0.2,
        "seed": rng.getrandbits(32),
        "prefix_cache": prefix,
        "_hash_bits": rng.choice([64, 64, 3, 0]) if prefix else 64,
        "events": rng.choice([0, 0, 3, 1000]) if prefix else 0,
    }
    if prefix and rng.random() < CROWDS and num_blocks is None and block_size is None:
        return crowded(rng, pool)
    appetite = rng.choice([1, 2, size, 2 * size + 1])
    rows = rng.choice([1, 2, 4, 8])
    return Shape(
        seed=rng.getrandbits(63),
        pool=pool,
        dice=draw_dice(rng, prefix),
        plans=rng.choice([1, 2, 3, 4]),
        max_rows=rows,
        max_tokens=max(1, rows * appetite - rng.choice([0, 0, 1])),
        appetite=appetite,
        alphabet=rng.choice([1, 2, 3]),
    )


def crowded(rng: random.Random, pool: dict[str, Any]) -> Shape:
    """More than a thousand namespaces, under open sequences: tables of names that grow."""
    weights = {**WEIGHTS, "open": 400, "open_prompt": 10, "commit": 20, "fork": 1, "close": 2}
    weights |= {"reset": 0, "ranks": 0, "flush": 0, "evict": 0}  # what would make it smaller again
    weights |= {"truncate": 1, "compact": 0.2, "evict_blocks": 0.2, "alloc": 0.2}
    return Shape(
        seed=rng.getrandbits(63),
        pool={**pool, "num_blocks": 64, "block_size": 1, "max_seqs": 2048, "max_blocks_per_seq": 2, "watermark": 0}
        | {"events": 0},
        dice=faces({name: weight for name, weight in weights.items() if name not in BARE_ONLY}),
        plans=2,
        max_rows=2,
        max_tokens=4,
        appetite=2,
        alphabet=2,
        spaces=8192,
    )


def draw_dice(rng: random.Random, prefix: bool, off: float = 0.2) -> tuple[int, ...]:
    """Weights around the usual ones, some operations off, as faces of 256."""
    weights = {}
    for name, usual in WEIGHTS.items():
        possible = name not in (BARE_ONLY if prefix else PREFIX_ONLY)
        on = name in ALWAYS or rng.random() >= off
        weights[name] = usual * 2 ** rng.uniform(-2, 2) if possible and on else 0.0
    return faces(weights)


def faces(weights: dict[str, float]) -> tuple[int, ...]:
    """256 shared out by weight, at least one face for what is on; the rest goes to `step`."""
    total = sum(weights.values())
    dice = [max(1, int(240 * weights.get(name, 0) / total)) if weights.get(name) else 0 for name in OPERATIONS]
    dice[OPERATIONS.index("step")] += 256 - sum(dice)
    return tuple(dice)


#: Usual weights of runs on pools with layer groups.
GROUP_WEIGHTS = {
    **{"open": 5, "step": 45, "reserve": 3, "fork": 6, "truncate": 6, "close": 6, "close_batch": 1},
    **{"done": 20, "done_any": 6, "execute": 5, "rollback": 6, "can": 2, "reset": 0.05},
    **{"alloc": 1, "incref": 2, "decref": 5, "mark_cached": 2, "touch": 2, "evict": 0.5, "drain_evicted": 0.5},
}


def groups_of(rng: random.Random, size: int, reserved: int) -> list[Group]:
    """One to eight groups; only states, or one at least has blocks in arena 0."""
    num_arenas = rng.choice([1, 1, 1, 2, 2, 3, 6])
    if rng.random() < 0.08:
        return [Group.state(rng.randint(2, 8)) for _ in range(rng.choice([1, 1, 2, 3]))]
    kinds = ["full"] if rng.random() < 0.4 else ["full", "full", "window", "window", "chunk", "state"]
    groups: list[Group] = []
    told = 0  # the last arena that has blocks
    for place in range(rng.choice([1, 2, 2, 2, 3, 3, 3, 4, 5, 8])):
        kind = rng.choice([kind for kind in kinds if place or kind != "state"])
        if kind == "state":
            groups.append(Group.state(rng.randint(2, 8)))
            continue
        options: dict[str, Any] = {"columns": rng.choice([1, 1, 2, 3])}
        if rng.random() < 0.6:
            options["block_size"] = size * rng.choice([1, 2, 2, 4])
        arena = rng.randrange(num_arenas) if place else 0
        if arena:
            options["arena"] = min(arena, told + 1)
            if arena > told:
                told, options["num_blocks"] = told + 1, reserved + rng.randint(6, 40)
        if kind == "window":
            width = rng.choice([rng.randint(1, 5), rng.randint(1, 12)])
            options["keep"] = rng.choice([0, rng.randrange(width)])
            groups.append(Group.window(width, **options))
        elif kind == "chunk":
            groups.append(Group.chunk(rng.choice([rng.randint(1, 5), rng.randint(1, 12)]), **options))
        else:
            groups.append(Group.full(**options))
    return groups


def options_of(seed: int) -> dict[str, Any]:
    """The pool of a run."""
    rng = random.Random(seed)
    size, reserved = rng.choice([1, 2, 2, 3, 4]), rng.choice([0, 1, 1, 2])
    groups = groups_of(rng, size, reserved)
    widths = [group.size for group in groups if group.kind in ("window", "chunk")]
    return {
        "num_blocks": reserved + rng.randint(8, 64),
        "block_size": size,
        "max_seqs": rng.choice([3, 5, 8, 8]),
        "max_blocks_per_seq": rng.choice([None, None, 6, 30]),
        "reserved_blocks": reserved,
        "watermark": rng.choice([0, 0, 2]),
        "in_order": rng.random() < 0.25,
        "lookahead": rng.choice([0, 0, rng.randrange(min(widths, default=5))]),
        "groups": groups,
        "prefix_cache": False,
        "events": 0,
        "two_classes": False,
    }


def draw_group_shape(seed: int) -> Shape:
    """A run on a pool with layer groups, checked after every call."""
    rng = random.Random(f"groups {seed}")
    pool = options_of(rng.getrandbits(48))
    pool["max_blocks_per_seq"] = pool["max_blocks_per_seq"] or 12
    size = pool["block_size"]
    appetite = rng.choice([1, 2, size + 1, 4 * size + 1])
    rows = rng.choice([1, 2, 4, 6])
    weights = {
        name: usual * 2 ** rng.uniform(-2, 2)
        for name, usual in GROUP_WEIGHTS.items()
        if name in ALWAYS or rng.random() >= 0.2
    }
    return Shape(
        seed=rng.getrandbits(63),
        pool=pool,
        dice=faces(weights),
        plans=rng.choice([1, 2, 3, 4]),
        max_rows=rows,
        max_tokens=max(1, rows * appetite - rng.choice([0, 0, 1])),
        appetite=appetite,
    )


def big_shape(seed: int, num_blocks: int = 1 << 20) -> Shape:
    """A run on a large pool, checked at checkpoints: batches stay small, what they touch is all over the pool."""
    rng = random.Random(seed)
    prefix = rng.random() < 0.5
    size = rng.choice([1, 2, 4])
    pool = {
        "num_blocks": num_blocks,
        "block_size": size,
        "max_seqs": rng.choice([1 << 12, 1 << 12, 1 << 15]),
        "max_blocks_per_seq": 48,
        "reserved_blocks": 1,
        "watermark": 0,
        "in_order": False,
        "seed": rng.getrandbits(32),
        "prefix_cache": prefix,
        "_hash_bits": 64,
    }
    usual = {**WEIGHTS, "defer_close": 0.5, "misuse": 0, "reset": 0, "flush": 0, "match": 0.5, "can": 0.5}
    usual |= {"load": 0.5, "loaded": 0.5}
    usual |= {"unshare": 0.2, "compact": 0.6, "evict_blocks": 0.6}  # rare: they cost many times what a step does
    possible = {name: w for name, w in usual.items() if w and name not in (BARE_ONLY if prefix else PREFIX_ONLY)}
    return Shape(
        seed=rng.getrandbits(63),
        pool=pool,
        dice=faces({name: w * 2 ** rng.uniform(-0.5, 0.5) for name, w in possible.items()}),
        plans=3,
        max_rows=rng.choice([1, 1, 2]),
        max_tokens=8,
        appetite=2,
        alphabet=64,
        hot=64,
        full=False,
    )


def plan_options(shape: Shape, index: int) -> dict[str, Any]:
    """Formats and dtype of the run's plan number `index`."""
    if "groups" in shape.pool:
        return {"formats": ("block_tables", "seq_lens", "slot_mapping")}
    if not shape.full:
        return {"formats": ("block_tables", "seq_lens", "slot_mapping")}
    more = ((), ("csr", "slot_ids"), ("kv_slots",), ("kv_slots_ragged",))[index % 4]
    return {"formats": (*_FORMATS, *more), "dtype": "int64" if index % 2 else "int32"}
