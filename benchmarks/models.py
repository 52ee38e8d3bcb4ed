"""Every model file of mlx-lm: how a pool serves it, and its bytes and times beside mlx-lm's own caches.

The models are tiny and random. Windows have the size of the model file's default, else 1,024 tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

import kvpool
from benchmarks.command import judged, main
from benchmarks.gate import Gate, table
from benchmarks.measure import Contestant, seconds_per_call
from benchmarks.tiny_families import NOT_RUN, OWN, build, config_of, randomize
from kvpool import OutOfBlocks
from kvpool.adapters.mlx_lm.hooks import Hook
from kvpool.adapters.mlx_lm.host import PagedKV, install
from kvpool.adapters.mlx_lm.layout import Layout, layout_of
from kvpool.adapters.mlx_lm.shapes import Leaf, ModelShape, Shape, inspect_model, leaves_of
from kvpool.adapters.mlx_lm.states import arrays_in
from kvpool.cli.console import CommandError, whole
from kvpool.config import format_nbytes

# ------------------------------------------------------------------------------------------------ the models


class Beside(NamedTuple):
    """What one quantity is on mlx-lm's own caches, and on the pool."""

    stock: float
    pool: float

    @property
    def ratio(self) -> float:
        """That on the pool, divided by that on mlx-lm's caches."""
        return self.pool / self.stock


FILES = tuple(sorted([*OWN, *NOT_RUN], key=str.lower))
"""All model files of mlx-lm 0.32.2."""

WINDOWS = ("sliding_window", "sliding_window_size", "attention_window_size", "loop_window_size", "attention_chunk_size")
"""Fields of a config with the tokens of a window or a chunk."""

USUAL = {"attention_chunk_size": 8192}
USUAL_WINDOW = 1024  # where neither a model file nor `USUAL` says one

MEDIUM = {  # numbers that replace those of a tiny config: 20 to 40 MB of weights in float32
    **{"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 8},
    **{"num_key_value_heads": 4, "head_dim": 64, "moe_intermediate_size": 256},
}
MEDIUM_OWN: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        **{"linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 64},
        "linear_value_head_dim": 64,
    },
    "nemotron_h": {
        **{"hybrid_override_pattern": list("M-M*-M"), "intermediate_size": 2048},
        **{"mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 64},
    },
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"] * 2, "block_dim": 256, "block_multiple_of": 256},
    "falcon_h1": {"mamba_d_ssm": 512, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64},
    "gemma3_text": {"query_pre_attn_scalar": 64, "sliding_window_pattern": 6},
    "gpt_oss": {"intermediate_size": 256, "layer_types": ["sliding_attention", "full_attention"] * 3},
}


def tiny(name: str, windows: bool = True) -> Any:
    """Return a tiny model of a file with random weights. `windows`: as large as they are used."""
    config = config_of(name)
    return _made(name, with_used_windows(name, config) if windows else config)


def medium(name: str) -> Any:
    """Return a model of some 30 MB, for the files of `MEDIUM_OWN`."""
    config = config_of(name, 4096)
    fields = config.get("text_config", config)
    fields.update(MEDIUM | MEDIUM_OWN[name])
    return _made(name, with_used_windows(name, config))


def _made(name: str, config: dict[str, Any]) -> Any:
    mx.random.seed(7)  # some model files draw weights that stay
    model = build(name, config)
    randomize(model)
    model.eval()
    mx.eval(model.parameters())
    return model


def with_used_windows(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return a config whose windows have the size that is the default of the model file, or a usual one."""
    changed: dict[str, Any] = {}
    for field, value in config.items():
        if isinstance(value, dict):
            changed[field] = with_used_windows(value.get("model_type", name), value)
        elif field in WINDOWS and isinstance(value, int):
            changed[field] = _default(name, field) or USUAL.get(field, USUAL_WINDOW)
        else:
            changed[field] = value
    return changed


def _default(name: str, field: str) -> int | None:
    """Return the default of a field in the arguments of a model file, None without one."""
    try:
        module = importlib.import_module(f"mlx_lm.models.{name}")
    except ImportError:
        return None
    own = [found for found in vars(module).values() if getattr(found, "__module__", None) == module.__name__]
    for arguments in filter(dataclasses.is_dataclass, own):
        for known in dataclasses.fields(arguments):
            if known.name == field and isinstance(known.default, int):
                return known.default
    return None


# ---------------------------------------------------------------------------------------------------------------- bytes

# In mlx-lm's own caches, and in the blocks of a pool. No model runs over the tokens, and nothing is computed: mlx-lm's
# caches are filled by their own ``update_and_fetch``, the pool by its steps, in the same pieces. MLX knows the sizes of
# arrays before it computes them. A state is what the model leaves after one token; both sides hold these arrays.
# Caches of unknown classes are filled by the model, and both sides hold these objects.

BLOCK_SIZE = 16
PIECE = 2048  # tokens that mlx-lm's generate feeds at once


def held(model: Any, num_rows: int, num_tokens: int) -> Beside:
    """Return what rows of so many tokens hold. The last token was a step of its own."""
    layout = layout_of(inspect_model(model), BLOCK_SIZE, keeps_all=False)
    whole = num_rows * _whole_nbytes(model, layout, num_tokens)
    return Beside(
        whole + _stock_nbytes(model, layout, num_rows, num_tokens), whole + _pool_nbytes(layout, num_rows, num_tokens)
    )


def pieces(num_tokens: int) -> Iterator[int]:
    """Yield the tokens that are fed at once: those of a prompt, and the last one alone."""
    left = num_tokens - 1
    while left > 0:
        yield min(left, PIECE)
        left -= PIECE
    yield 1


def merged(make: Callable[[], list[Any]], num_rows: int) -> list[Any]:
    """Return empty caches of a batch."""
    return [caches[0].merge(list(caches)) for caches in zip(*(make() for _ in range(num_rows)), strict=True)]


def _whole_nbytes(model: Any, layout: Layout, num_tokens: int) -> int:
    """Return the bytes of the states of one row, and of the caches that are held whole."""
    caches = Hook.stock_caches(model)
    is_opaque = any(leaf.kind == "opaque" for leaf in layout.leaves)
    for new in pieces(num_tokens) if is_opaque else (1,):
        model(mx.zeros((1, new), mx.int32), cache=caches)
    found = list(leaves_of(caches))
    return sum(x.nbytes for leaf in layout.held for x in arrays_in([found[leaf]]))


def _stock_nbytes(model: Any, layout: Layout, num_rows: int, num_tokens: int) -> int:
    """Return the bytes of keys and values in mlx-lm's caches. A class that cannot be batched has a cache per row."""
    total = 0
    for leaf, one in zip(layout.leaves, leaves_of(Hook.stock_caches(model)), strict=True):
        if leaf.shape is None:
            continue
        is_batch = num_rows > 1 and hasattr(one, "merge")
        cache = one.merge([one] * num_rows) if is_batch else one
        _fill(cache, leaf, num_rows if is_batch else 1, num_tokens)
        total += (cache.keys.nbytes + cache.values.nbytes) * (1 if is_batch else num_rows)
    return total


def _fill(cache: Any, leaf: Leaf, num_rows: int, num_tokens: int) -> None:
    shape = leaf.shape
    assert shape is not None
    dtype = getattr(mx, shape.dtype)
    for new in pieces(num_tokens):
        if leaf.kind == "chunk":
            cache.maybe_trim_front()
        outer = num_rows, shape.num_kv_heads, new
        cache.update_and_fetch(mx.zeros((*outer, shape.head_dim), dtype), mx.zeros((*outer, shape.v_head_dim), dtype))


def _pool_nbytes(layout: Layout, num_rows: int, num_tokens: int) -> int:
    """Return the bytes of the blocks that are in use in all arenas."""
    num_blocks = 1 + num_rows * (-(-num_tokens // BLOCK_SIZE) + 1)
    with layout.make_pool(num_blocks, BLOCK_SIZE, num_rows) as pool:
        plan = kvpool.Plan(pool, num_rows, num_rows * PIECE)
        rows = np.array([pool.open() for _ in range(num_rows)], np.int64)
        for new in pieces(num_tokens):
            pool.step(plan, rows, np.full(num_rows, new))
            pool.done(plan)
        return sum(pool.stats(arena).used * nbytes for arena, nbytes in enumerate(layout.block_nbytes))


# ---------------------------------------------------------------------------------------------------------------- times

# Of a decode step, and of a chunk of a prompt. Both sides take turns on the same model, and the medians are compared.
# Time is that of the CPU, of all threads: others may use the machine, too. A step is what mlx-lm's ``generate_step``
# does: the next one is built while this one runs. A chunk ends with the evaluation of the caches.

CHUNK = 512
STEPS = 4  # in a timed run
FEW = 3  # runs of a chunk of one row; the chunk of a batch takes long, and runs once


def installed(model: Any, num_rows: int, repetitions: int) -> PagedKV:
    """Return a pool with room for the runs of `timed`."""
    num_blocks = 1 + 2 * (num_rows + 1) * -(-(CHUNK + STEPS * (repetitions + 1)) // BLOCK_SIZE)
    return install(model, num_blocks, block_size=BLOCK_SIZE, max_seqs=4 * num_rows + 8)


def timed(kv: PagedKV, num_rows: int, repetitions: int) -> tuple[Beside, Beside]:
    """Time a decode step of rows with 512 tokens and more, and the first 512 tokens of all rows. `kv` is entered.

    The rows that decode are those of the last chunk.
    """
    makers = {"stock": lambda: Hook.stock_caches(kv.model), "pool": kv.make_cache}
    fed: dict[str, list[Any]] = {}

    def chunk(who: str) -> None:
        fed.pop(who, None)  # the blocks of the run before
        fed[who] = _fed(kv.model, makers[who], num_rows)

    for make in makers.values():
        _fed(kv.model, make, 1)  # warm-up: MLX does more work in a first run
    chunks = [Contestant(who, partial(chunk, who)) for who in makers]
    of_chunk = _turns(chunks, min(FEW, repetitions) if num_rows == 1 else 1)
    steps = [Contestant(who, _decoding(kv.model, fed[who], num_rows), STEPS) for who in makers]
    return _turns(steps, repetitions), of_chunk


def _turns(both: list[Contestant], rounds: int) -> Beside:
    """Return the median seconds of a call of each."""
    found = [[seconds_per_call(one, time.process_time) for one in both] for _ in range(rounds)]
    return Beside(*map(statistics.median, zip(*found, strict=True)))


def _fed(model: Any, make: Callable[[], list[Any]], num_rows: int) -> list[Any]:
    """Return the caches of rows with a prompt of one chunk."""
    caches = make() if num_rows == 1 else merged(make, num_rows)
    model(mx.array([[(7 * i + 11 * row) % 90 + 1 for i in range(CHUNK)] for row in range(num_rows)]), cache=caches)
    mx.eval([cache.state for cache in caches])
    return caches


def _decoding(model: Any, caches: list[Any], num_rows: int) -> Callable[[], object]:
    """Return a function that decodes some tokens more of each row."""
    newest = mx.ones((num_rows, 1), mx.int32)

    def step(tokens: mx.array) -> mx.array:
        following = mx.argmax(model(tokens, cache=caches)[:, -1:], axis=-1)
        mx.async_eval(following)
        return following

    def run() -> None:
        nonlocal newest
        for _ in range(STEPS):
            before, newest = newest, step(newest)
            mx.eval(before)
        mx.eval(newest)

    return run


# ------------------------------------------------------------------------------------------------------------- capacity


MAX_SEQS = 256
SLIDING = Leaf("window", "RotatingKVCache", 1024, Shape(16, 256, 256, "bfloat16"))
FULL = Leaf("full", "KVCache", 0, Shape(4, 512, 512, "bfloat16"))
LEAVES = ((SLIDING,) * 5 + (FULL,)) * 10
MODEL = ModelShape(LEAVES, tuple(range(len(LEAVES))), (None,) * len(LEAVES), is_apart=False)
GROUPS = layout_of(MODEL, BLOCK_SIZE, keeps_all=False, is_shared=True)
EVERYTHING = replace(GROUPS, groups=tuple(replace(group, kind="full", size=0) for group in GROUPS.groups))


class Capacity(NamedTuple):
    """Sequences that fit."""

    everything: int
    groups: int

    @property
    def ratio(self) -> float:
        """Those with layer groups, divided by those of a pool that keeps everything."""
        return self.groups / self.everything


def gemma4_31b(num_tokens: int, num_kept: int = 16) -> Capacity:
    """Return how many sequences fit into the blocks of `num_kept` sequences that keep everything."""
    num_blocks = 1 + num_kept * -(-num_tokens // BLOCK_SIZE)
    return Capacity(fitting(EVERYTHING, num_blocks, num_tokens), fitting(GROUPS, num_blocks, num_tokens))


def fitting(layout: Layout, num_blocks: int, num_tokens: int) -> int:
    """Return how many sequences a pool holds, read in pieces one after the other."""
    with layout.make_pool(num_blocks, BLOCK_SIZE, MAX_SEQS) as pool:
        plan = kvpool.Plan(pool, 1, num_tokens, table_width=-(-num_tokens // BLOCK_SIZE))
        for number in range(MAX_SEQS):
            row = pool.open()
            try:
                for new in pieces(num_tokens):
                    pool.step(plan, [row], new)
                    pool.done(plan)
            except OutOfBlocks:
                return number
    return MAX_SEQS


# ------------------------------------------------------------------------------------------------------------ the table


CONTEXTS = {"4k": 4096, "32k": 32768}
BATCH = 8


@dataclass(frozen=True)
class Line:
    """What was found of one model file."""

    name: str
    route: str  # how it is served, in a word or two
    why: str = ""  # its attention gathers, or it does not run
    held: dict[tuple[str, int], Beside] | None = None  # by context and rows
    decode: Beside | None = None  # of one sequence
    chunk: Beside | None = None

    def as_json(self) -> dict[str, Any]:
        """Everything."""
        held = {f"{context} x {rows}": asdict_of(found) for (context, rows), found in (self.held or {}).items()}
        return asdict(self) | {"held": held, "decode": asdict_of(self.decode), "chunk": asdict_of(self.chunk)}


def asdict_of(found: Any) -> dict[str, float] | None:
    """Return a named tuple and its ratio as a dict."""
    return None if found is None else {**found._asdict(), "ratio": found.ratio}


def measure(names: Sequence[str], repetitions: int, say: Callable[[str], None]) -> Iterator[Line]:
    """Measure these files one after the other."""
    for name in names:
        if name in NOT_RUN:
            yield Line(name, "does not run", NOT_RUN[name])
            continue
        model = tiny(name)
        found = {
            (context, rows): held(model, rows, num_tokens)
            for context, num_tokens in CONTEXTS.items()
            for rows in (1, BATCH)
        }
        with installed(model, 1, repetitions) if repetitions else install(model, 64) as kv:
            route, why = route_of(kv)
            decode, chunk = timed(kv, 1, repetitions) if repetitions else (None, None)
        line = Line(name, route, why, found, decode, chunk)
        say(" | ".join(cells(line)))
        yield line


def route_of(kv: PagedKV) -> tuple[str, str]:
    """Return how a model is served, and why its attention gathers."""
    kinds = {leaf.kind for leaf in kv.layout.leaves}
    way, _, why = kv.route.partition("; opaque: ")[0].partition(": ")
    parts = [{"fused": "fused", "gather": "gathered"}[way]] if kinds & {"full", "window", "chunk"} else []
    parts += ["states"] * ("state" in kinds) + ["held whole"] * ("opaque" in kinds)
    return " + ".join(parts), why if parts[0] == "gathered" else ""


def as_text(lines: Sequence[Line]) -> str:
    """Return the table, what it counts, and the reasons."""
    head = ["file", "served", "4k", "1", str(BATCH), "32k", "1", str(BATCH)]
    head += ["decode", "chunk"] if any(line.decode for line in lines) else []
    shown = table(head, *(cells(line)[: len(head)] for line in lines))
    reasons = [f"- {line.name}: {line.why}" for line in lines if line.why]
    counts = Counter(line.route for line in lines).most_common()
    counted = ", ".join(f"{count} {route}" for route, count in counts)
    return "\n".join([shown, "", f"{len(lines)} files: {counted}.", "", *reasons])


def cells(line: Line) -> list[str]:
    """Return a row of the table."""
    found = [line.name, line.route]
    for context in CONTEXTS:
        one, batch = (None if line.held is None else line.held[context, rows] for rows in (1, BATCH))
        found += ["" if one is None else format_nbytes(int(one.stock))]
        found += ["" if each is None else f"{each.ratio:.3f}" for each in (one, batch)]
    return found + ["" if each is None else f"{each.ratio:.2f}" for each in (line.decode, line.chunk)]


# ----------------------------------------------------------------------------------------------------- what has to hold


BYTES_MAX = 1.05
CAPACITY_MIN = 7.0
TIME_MAX = 1.20


def gates_of(names: Sequence[str], rows: Sequence[int], repetitions: int, say: Callable[[str], None]) -> Iterator[Gate]:
    """Measure every gate; those of time for the files among `names` that have a medium model."""
    say("bytes")
    yield bytes_gate(names)
    yield capacity_gate()
    for name in names if repetitions else ():
        if name in MEDIUM_OWN:
            say(f"times, {name}")
            yield from time_gates(name, rows, repetitions)


def bytes_gate(names: Sequence[str]) -> Gate:
    """Judge the most bytes of all files, contexts and batches, relative to those of mlx-lm's caches."""
    ratio, note = max(
        (held(model, num_rows, num_tokens).ratio, f"{name}, {num_rows} x {context}")
        for name in names
        if name not in NOT_RUN
        for model in (tiny(name),)
        for context, num_tokens in CONTEXTS.items()
        for num_rows in (1, BATCH)
    )
    return Gate("bytes / mlx-lm, the most", ratio, BYTES_MAX, at_most=True, note=note)


def capacity_gate() -> Gate:
    """Judge how many more sequences layer groups hold."""
    found = gemma4_31b(CONTEXTS["32k"])
    note = f"{found.groups} beside {found.everything} that keep every token, Gemma 4 31B"
    return Gate("32k sequences in one budget", found.ratio, CAPACITY_MIN, note=note, unit="x")


def time_gates(name: str, rows: Sequence[int], repetitions: int) -> Iterator[Gate]:
    """Judge a decode step and a chunk of a tiny and a medium model."""
    for size, make in (("tiny", tiny), ("medium", medium)):
        model = make(name)
        for num_rows in rows:
            with installed(model, num_rows, repetitions) as kv:
                found = timed(kv, num_rows, repetitions)
            for what, one in zip(("decode", "chunk"), found, strict=True):
                note = f"{one.pool * 1e3:.2f} ms beside {one.stock * 1e3:.2f} ms"
                yield Gate(f"{what}, {name} {size} x {num_rows}", one.ratio, TIME_MAX, at_most=True, note=note)


# ---------------------------------------------------------------------------------------------------------- the command


OPTIONS = {
    "files": ("", "these model files only: NAME,..."),
    "repetitions": (15, "timed runs of each; 0 measures no time"),
    "gates": (False, "bytes of all files, the capacity of Gemma 4 31B, and times of six files"),
    "batch": ("1,4,16", "with --gates: rows"),
}


def run(args: argparse.Namespace) -> int:
    """Print the table, or with ``--gates`` what has to hold: 1 if something does not."""
    mx.set_default_device(mx.cpu)
    names = tuple(args.files.split(",")) if args.files else FILES
    for name in names:
        if name not in FILES:
            raise CommandError(f"--files {name}: no model file of mlx-lm 0.32.2")

    def say(what: str) -> None:
        print(what, file=sys.stderr, flush=True)

    if args.gates:
        rows = [whole("--batch", text) for text in args.batch.split(",")]
        return judged(list(gates_of(names, rows, args.repetitions, say)), args)
    lines = list(measure(names, args.repetitions, say))
    print(json.dumps([line.as_json() for line in lines], indent=2) if args.json else as_text(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
