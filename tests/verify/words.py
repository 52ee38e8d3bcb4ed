"""What a run is made of: its pool, its plans, the weights of its words and its appetite; all from a seed.

Some words are left out of each run (Groce et al., *Swarm Testing*, 2012): a call that undoes what others need is
missing in some runs, and a rare one is frequent in others.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from kvpool import Group

KINDS = ("full", "window", "chunk", "state")
SPACES = (b"", b"a", b"b")
CAP = 160  # tokens that a row may have
#: Every feature of the core is a word. Usual weights; a run draws its own around them.
WEIGHTS: dict[str, float] = {
    **{"open": 3, "prompt": 8, "step": 24, "prefill": 8, "chunk": 4, "reserve": 2, "execute": 4, "done": 18},
    **{"done_any": 3, "rollback": 5, "commit": 12, "lie": 2, "fork": 5, "truncate": 4, "close": 7},
    **{"defer_close": 1, "unshare": 4, "compact": 3, "evict_blocks": 2, "pin": 1, "match": 1},
    **{"evict": 1, "flush": 0.5, "load": 4, "loaded": 4, "alloc": 2, "incref": 1, "decref": 3, "mark_cached": 4},
    **{"touch": 2, "can": 2, "events": 1, "stale": 1, "read": 2, "bind": 0.5, "reset": 0.05, "resize": 3, "keep": 8},
}
WORDS = tuple(WEIGHTS)
ALWAYS = ("step", "done")  # a run without these goes nowhere
CACHE_ONLY = ("chunk", "commit", "lie", "pin", "match", "flush", "load", "loaded", "events", "keep")
BARE_ONLY = ("mark_cached", "touch")
FULL_ONLY = ("unshare", "compact", "evict_blocks")
SWARM = (0, 0.25, 1, 1, 1, 4)
FACES = 1024
SHARED = 987  # of these are shared out by weight


@dataclass(frozen=True, slots=True)
class Shape:
    """One run. `dice` has FACES faces, shared out to WORDS."""

    seed: int
    pool: dict[str, Any]
    dice: bytes
    plans: tuple[dict[str, Any], ...]
    alphabet: int  # tokens of texts: few, so that prefixes meet
    texts: int  # out of 8 rows that many repeat a text that others have, too
    eager: int  # out of 8 plans that many are executed at once
    hot: int  # out of 8 calls that many are about the row of the call before


def groups_of(rng: random.Random, size: int, reserved: int) -> list[Group]:
    """One to five groups; only states, or one at least has blocks in arena 0."""
    if rng.random() < 0.05:
        return [Group.state(rng.randint(3, 8), blocks=rng.choice((0, 1, 2))) for _ in range(rng.choice((1, 1, 2)))]
    kinds = rng.choice((("full",), ("full",), ("full", "window", "chunk"), KINDS, (*KINDS, "window", "full")))
    num_arenas, told = rng.choice((1, 1, 1, 2, 3)), 0
    made: list[Group] = []
    for place in range(rng.choice((1, 1, 2, 2, 3, 3, 4, 5))):
        kind = rng.choice([kind for kind in kinds if place or kind != "state"])
        if kind == "state":
            made.append(Group.state(rng.randint(3, 10), blocks=rng.choice((0, 1, 1, 2, 3))))
            continue
        columns, times = rng.choice((1, 1, 1, 2, 3)), rng.choice((1, 1, 2, 4))
        options: dict[str, Any] = {"columns": columns, "block_size": size * times}
        arena = min(rng.randrange(num_arenas), told + 1) if place else 0
        if arena:
            options["arena"] = arena
            if arena > told:
                told, options["num_blocks"] = arena, reserved + rng.choice((rng.randint(8, 48), 120))
        if kind == "window":
            width = rng.randint(1, rng.choice((4, 12, 30)))
            made.append(Group.window(width, keep=rng.choice((0, rng.randrange(width), width - 1)), **options))
        elif kind == "chunk":
            made.append(Group.chunk(rng.randint(1, rng.choice((4, 12))), **options))
        else:
            made.append(Group.full(**options))
    return made


def shape_of(seed: int, without: tuple[str, ...] = ()) -> Shape:
    """The run of a seed, without some words."""
    rng = random.Random(f"verify {seed}")
    size, reserved = rng.choice((1, 2, 2, 3, 4, 4, 5, 8)), rng.choice((0, 1, 1, 2))
    cache = rng.random() < 0.75
    groups = groups_of(rng, size, reserved) if rng.random() < 0.75 else None
    if groups and cache and all(group.kind != "full" for group in groups) and rng.random() < 0.7:
        groups.insert(0, Group.full(block_size=size))  # without one, a pool has room for a million nodes
    cost = sum(group.columns * size / (group.block_size or size) for group in groups or () if group.kind != "state")
    cost += sum(group.blocks / 4 for group in groups or ())
    widths = [group.size for group in groups or () if group.kind in ("window", "chunk")]
    longest = CAP // (4 * size) * 4
    pool = {
        "num_blocks": reserved + int(max(cost, 1) * rng.choice((rng.randint(8, 16), rng.randint(12, 40), 64))),
        "block_size": size,
        "max_seqs": rng.choice((3, 5, 8, 12)),
        "max_blocks_per_seq": min(longest, rng.choice((longest, longest, 24, 16, 16, 8))),
        "reserved_blocks": reserved,
        "watermark": rng.choice((0, 0, 0, 2)),
        "in_order": rng.random() < 0.15,
        "seed": rng.getrandbits(32),
        "prefix_cache": cache,
        "events": rng.choice((0, 4, 10_000, 10_000)) if cache else 0,
        "lookahead": rng.choice((0, rng.randrange(min(widths, default=4)), min(widths, default=4) - 1)),
        "groups": groups,
        "_hash_bits": rng.choice((32, 32, 3, 0)) if cache else 32,
    }
    plans = [_plan(rng, pool["max_blocks_per_seq"]) for _ in range(rng.choice((1, 2, 2, 3, 4)))]
    return Shape(
        seed=rng.getrandbits(63),
        pool=pool,
        dice=faces(rng, cache, groups, without),
        plans=tuple(plans),
        alphabet=rng.choice((1, 2, 2, 3)),
        texts=rng.choice((0, 6, 7, 8)) if cache else 0,
        eager=rng.choice((0, 0, 2, 8)),
        hot=rng.choice((0, 3, 6)),
    )


def _plan(rng: random.Random, blocks: int) -> dict[str, Any]:
    """Sizes and formats of a plan."""
    formats = ["block_tables", "slot_mapping", "seq_lens", "cu_q_lens", "positions"]
    formats += rng.choice(([], ["slot_ids"], ["slot_ids", "csr"]))
    return {
        "max_rows": rng.choice((1, 3, 6)),
        "max_tokens": rng.choice((12, 48, 96)),
        "formats": tuple(formats),
        "table_width": rng.choice((blocks, blocks, blocks + 1, blocks + 40)),
    }


def faces(rng: random.Random, cache: bool, groups: list[Group] | None, without: tuple[str, ...]) -> bytes:
    """FACES shared out by weight; the rest goes to `step`."""
    weights = {}
    no_full = groups is not None and all(group.kind != "full" for group in groups)
    for word, usual in WEIGHTS.items():
        left_out = word in without or word in (BARE_ONLY if cache else CACHE_ONLY) or (no_full and word in FULL_ONLY)
        if word in ("resize", "keep"):  # in every eighth run; the programs of the others do not change with it
            weights[word] = 0 if left_out or random.Random(str(weights)).random() > 0.125 else usual
            continue
        weights[word] = 0 if left_out else usual * (rng.choice(SWARM[2:] if word in ALWAYS else SWARM))
    total = sum(weights.values())
    dice: list[int] = []
    for number, word in enumerate(WORDS):
        share = int(SHARED * weights[word] / total)
        dice += [number] * (max(1, share) if weights[word] else 0)
    return bytes(dice + [WORDS.index("step")] * (FACES - len(dice)))
