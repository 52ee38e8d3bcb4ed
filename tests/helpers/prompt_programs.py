"""Random programs on a `PromptCache`, beside a naive model.

A program is a cache of one kind with a random budget, with or without a store, and random calls on it. The model keeps
every prompt whole. It says how long a hit may be, and must be where nothing can have left. The content of a cache is a
function of its tokens, so every hit is compared with what its tokens stand for.
"""

from __future__ import annotations

import importlib
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np

from kvpool.adapters.prompt_cache import INDEX_NBYTES, PromptCache
from kvpool.adapters.prompt_store import store_layout
from kvpool.retention import Keep
from kvpool.store import MemoryStore

mlx_caches: Any = importlib.import_module(os.environ.get("KVPOOL_CACHES", "mlx_lm.models.cache"))
HEADS, WIDTH, WINDOW, KEEP = 2, 2, 24, 4
PROGRAM = 200  # calls of a program
ROOMY = 1 << 24  # a budget that no program fills
LONGEST = 160  # tokens of a prompt
KINDS = ("dense", "quantized", "window", "chunk", "state", "states", "list", "batch", "unknown")
CUT = ("dense", "quantized", "batch")  # kinds that are found at every length
BOUNDED = ("window", "chunk")
STORED = ("dense", "quantized", "window", "chunk", "state", "states", "list")
WEIGHTS = np.random.default_rng(5).integers(1, 1 << 40, LONGEST + 1)

_OTHER = ThreadPoolExecutor(1)


class Unknown:
    """A cache of a class that nobody knows."""

    nbytes = 100

    def __init__(self, digest: int) -> None:
        self.digest = digest

    def is_trimmable(self) -> bool:
        return False


def digests(tokens: list[int]) -> np.ndarray:
    """A number for each prefix of a prompt, so that a row says which tokens are up to it."""
    return (np.cumsum((np.array(tokens, np.int64) + 1) * WEIGHTS[: len(tokens)]) % 4_294_967_291).astype(np.uint32)


def plane(tokens: list[int], layer: int) -> np.ndarray:
    """Rows of one array, uint32 ``[1, HEADS, tokens, WIDTH]``."""
    added = (np.arange(HEADS * WIDTH, dtype=np.uint32) + 10 * layer).reshape(1, HEADS, 1, WIDTH)
    return digests(tokens)[None, None, :, None] + added


def made(kind: str, tokens: list[int], rng: random.Random) -> list[Any]:
    """Caches of a model that has computed these tokens."""
    if kind == "unknown":
        return [Unknown(int(digests(tokens)[-1]))]
    if kind == "states":
        return [state(tokens), state(tokens)]
    if kind == "list":
        return [mlx_caches.CacheList(full(tokens, 0, rng), state(tokens)), full(tokens, 1, rng)]
    if kind == "batch":
        return [mlx_caches.BatchKVCache.merge([full(tokens, layer, rng)]) for layer in range(2)]
    if kind == "quantized":
        cache = mlx_caches.QuantizedKVCache(group_size=32, bits=8)
        cache.keys, cache.values = (
            [mx.array(part) if part.dtype == np.uint32 else mx.array(part, mx.bfloat16) for part in packed(tokens, n)]
            for n in range(2)
        )
        cache.offset = len(tokens)
        return [cache]
    second = {"dense": full, "window": window, "chunk": chunk, "state": lambda tokens, layer, rng: state(tokens)}
    return [full(tokens, 0, rng), second[kind](tokens, 1, rng)]


def full(tokens: list[int], layer: int, rng: random.Random) -> Any:
    cache = mlx_caches.KVCache()
    if rng.random() < 0.05:  # as models do it
        for start in range(0, len(tokens), 50):
            rows = plane(tokens, layer)[:, :, start : start + 50]
            cache.update_and_fetch(mx.array(rows), mx.array(rows + 5))
        return cache
    more = np.full((1, HEADS, rng.choice([0, 3]), WIDTH), 77, np.uint32)  # nobody may read these
    rows = plane(tokens, layer)
    cache.keys, cache.values = (mx.array(np.concatenate([each, more], axis=2)) for each in (rows, rows + 5))
    cache.offset = len(tokens)
    return cache


def packed(tokens: list[int], layer: int) -> list[np.ndarray]:
    """Rows, scales and biases. A cache has the last two as bfloat16, which has these numbers to the bit."""
    rows = plane(tokens, layer)
    small = (rows[..., :1] % 128).astype(np.float32)
    return [rows, small, small + 1]


def window(tokens: list[int], layer: int, rng: random.Random) -> Any:
    """A rotating cache in one of its forms: short, in temporal order, longer than the window, rotated."""
    cache = mlx_caches.RotatingKVCache(WINDOW, keep=KEEP)
    rows = plane(tokens, layer)
    if len(tokens) > WINDOW:
        more = rng.choice([0, 0, 5]) if len(tokens) > WINDOW + 5 else 0
        rows = np.concatenate([rows[:, :, :KEEP], rows[:, :, KEEP - WINDOW - more :]], axis=2)
    cache._idx = rows.shape[2]
    if rows.shape[2] == WINDOW < len(tokens) and rng.random() < 0.5:
        turn = rng.randrange(WINDOW - KEEP)
        rows = np.concatenate([rows[:, :, :KEEP], np.roll(rows[:, :, KEEP:], turn, axis=2)], axis=2)
        cache._idx = KEEP + turn if turn else WINDOW
    cache.keys, cache.values, cache.offset = mx.array(rows), mx.array(rows + 5), len(tokens)
    return cache


def chunk(tokens: list[int], layer: int, rng: random.Random) -> Any:
    cache = mlx_caches.ChunkedKVCache(WINDOW)
    cache.start_position = max(0, len(tokens) - WINDOW - rng.choice([0, 7]))
    rows = plane(tokens, layer)[:, :, cache.start_position :]
    cache.keys, cache.values, cache.offset = mx.array(rows), mx.array(rows + 5), len(tokens)
    return cache


def state(tokens: list[int]) -> Any:
    cache = mlx_caches.ArraysCache(2)
    digest = digests(tokens)[-1:]
    cache[0], cache[1] = mx.array(digest).reshape(1, 1), mx.array(digest % 128, mx.bfloat16).reshape(1, 1)
    return cache


def fault_in(caches: list[Any], kind: str, tokens: list[int]) -> str:
    """What is wrong with caches that should hold these tokens, or nothing."""
    leaves = [leaf for cache in caches for leaf in (cache.caches if hasattr(cache, "caches") else [cache])]
    for layer, cache in enumerate(leaves):
        layer -= kind == "list" and layer > 0
        if type(cache) is Unknown:
            same = cache.digest == digests(tokens)[-1]
        elif type(cache) is mlx_caches.ArraysCache:
            digest = int(digests(tokens)[-1])
            same = [int(array.item()) for array in cache.cache] == [digest, digest % 128]
        elif type(cache) is mlx_caches.QuantizedKVCache:
            planes = [array[..., : cache.offset, :] for arrays in (cache.keys, cache.values) for array in arrays]
            held = [np.array(plane.astype(mx.float32) if plane.dtype == mx.bfloat16 else plane) for plane in planes]
            expected = [*packed(tokens, 0), *packed(tokens, 1)]
            same = cache.offset == len(tokens) and all(map(np.array_equal, held, expected))
        else:
            rows = plane(tokens, layer)
            if type(cache) is mlx_caches.RotatingKVCache:
                keys, values = map(cache._temporal_order, (cache.keys, cache.values))
            else:
                held = cache.offset - getattr(cache, "start_position", 0)
                keys, values = cache.keys[..., :held, :], cache.values[..., :held, :]
            if type(cache) is mlx_caches.RotatingKVCache and len(tokens) > WINDOW:
                rows = np.concatenate([rows[:, :, :KEEP], rows[:, :, KEEP - WINDOW :]], axis=2)
            if type(cache) is mlx_caches.ChunkedKVCache:
                rows = rows[:, :, -WINDOW:]
            same = cache.offset == len(tokens) and np.array_equal(np.asarray(keys), rows)
            same = same and np.array_equal(np.asarray(values), rows + 5)
        if not same:
            return f"{type(cache).__name__} of layer {layer} has other content"
    return ""


class Naive:
    """Every prompt that was inserted, whole. A span of media is a letter of its own in `text`."""

    def __init__(self, kind: str, is_stored: bool = False) -> None:
        bound = WINDOW if kind in BOUNDED and not is_stored else 0
        self.most = LONGEST if kind in CUT else bound  # the longest prompt that has all rows
        self.known: set[str] = set()

    def add(self, text: str) -> None:
        has_rows = len(text) - 1 <= self.most
        self.known |= {text[:length] for length in range(2, len(text) + 1)} if has_rows else {text}

    def longest(self, text: str, spans: list[tuple[int, int, str]]) -> int:
        """Tokens of the longest hit. The first letter of `text` is the namespace."""
        for length in range(len(text) - 1, 1, -1):
            inside = any(start < length - 1 < stop for start, stop, _ in spans)
            if not inside and text[:length] in self.known:
                return length - 1
        return 0


def text_of(tokens: list[int], spans: list[tuple[int, int, str]], namespace: bytes) -> str:
    letters = [chr(48 + token) for token in tokens]
    for start, stop, digest in spans:
        letters[start:stop] = chr(1000 * ord(digest) + stop - start) * (stop - start)
    return ("x" if namespace else "y") + "".join(letters)


class Program:
    """Random calls on one cache."""

    def __init__(self, seed: int, kind: str | None = None, options: dict[str, Any] | None = None) -> None:
        self.rng = rng = random.Random(seed)
        self.kind = kind or rng.choice(KINDS)
        self.options = {"max_bytes": rng.choice([ROOMY, ROOMY, 6_000, 40_000])} if options is None else options
        if options is None and rng.random() < 0.2:
            self.options["checkpoint_bytes"] = rng.choice([100, 1000])
        if options is None and rng.random() < 0.3:
            self.options["max_size"] = rng.randint(1, 6)
        if options is None and rng.random() < 0.3 and self.kind in STORED:
            layout = store_layout(made(self.kind, [0] * 30, rng), b"weights")
            self.options["store"] = MemoryStore(layout, rng.choice([1 << 30, 30_000]))
        self.prompts = PromptCache(**self.options)
        self.naive, self.stored = Naive(self.kind), Naive(self.kind, is_stored=True)
        self.loses = len(self.options) > 1 or self.options["max_bytes"] < ROOMY
        store = self.options.get("store")
        self.keeps = store is not None and store.max_nbytes == 1 << 30 and self.options["max_bytes"] == ROOMY
        self.keeps = self.keeps and "checkpoint_bytes" not in self.options
        self.bases: list[tuple[list[int], list[tuple[int, int, str]]]] = [([], [])]
        self.operations = 0
        self.directives = random.Random(seed)
        self.fetches = _OTHER.submit  # one thread inserts, another one fetches, the first one reads

    def run(self, calls: int = PROGRAM) -> str:
        """What was found, or nothing."""
        for number in range(calls):
            said = self.call()
            if said:
                return f"call {number} on {self.kind} {self.options}: {said}"
        self.prompts._index.pool.check()
        return ""

    def prompt(self) -> tuple[list[int], list[tuple[int, int, str]]]:
        """Tokens and a span of media or none, often those of an earlier prompt, cut anywhere."""
        rng = self.rng
        base, spans = rng.choice(self.bases[-8:])
        base = base[: rng.choice([len(base), rng.randint(0, len(base))])][: LONGEST - 40]
        tokens = base + [rng.randrange(3) for _ in range(rng.randint(1, 40))]
        if not spans and rng.random() < 0.1:
            start = rng.randrange(len(tokens))
            spans = [(start, start + rng.randint(1, 20), "c")]
        digest = rng.choice("cccd")
        if rng.random() < 0.1:
            spans = [(start, start + rng.randint(1, 20), digest) for start, _, digest in spans]
        spans = [(start, min(stop, len(tokens)), digest) for start, stop, _ in spans if start < len(tokens)]
        for start, stop, _ in spans:  # what a model makes of media depends on them, not on their tokens
            tokens[start:stop] = [ord(digest)] * (stop - start)
            if rng.random() < 0.2:  # nothing is left to compute but media
                del tokens[stop:]
        return tokens, spans

    def directive(self) -> Keep | None:
        draw = self.directives
        keep = Keep(draw.randint(1, 7), draw.randint(1, 60), draw.choice([None, 20, 50]))
        return keep if draw.random() < 0.2 else None

    def call(self) -> str:
        rng, chance = self.rng, self.rng.random()
        self.operations += 1
        if chance < 0.02:
            self.loses = True
            self.prompts.trim_to(**rng.choice([{"n_sequences": rng.randint(0, 4)}, {"n_bytes": rng.randint(0, 9000)}]))
            return ""
        if chance < 0.04 and "store" in self.options:
            self.prompts, self.loses = PromptCache(**self.options), True
            return ""
        (tokens, spans), namespace = self.prompt(), rng.choice([b"", b"other"])
        if chance < 0.5:
            said = self.fetched(tokens, namespace, spans)
            return said or self.fault_in_account()
        self.bases.append((tokens, spans))
        text = text_of(tokens, spans, namespace)
        self.naive.add(text)
        if not spans:
            self.stored.add(text)
        caches = made(self.kind, tokens, rng)
        more = [7] * rng.choice([0, 0, 2]) if self.kind not in ("unknown", "states") else []  # were not computed
        self.prompts.insert([*tokens, *more], caches, namespace, media=spans, keep=self.directive())
        self.use(caches)
        if not self.loses and not spans:  # what was inserted is found at once
            self.operations += 1
            said = self.fetched([*tokens, 7], namespace, [])
            return said or self.fault_in_account()
        return self.fault_in_account()

    def fetched(self, tokens: list[int], namespace: bytes, spans: list[tuple[int, int, str]]) -> str:
        given = self.directives.choice([list, tuple, np.array])(tokens)
        caches, length = self.fetches(self.prompts.fetch, given, namespace, media=spans).result()
        text = text_of(tokens, spans, namespace)
        most = self.naive.longest(text, spans)
        if type(length) is not int:
            return f"the length is {length!r}"
        if length > most:
            return f"{length} tokens found, only {most} were ever inserted"
        if length < most and not self.loses:
            return f"{length} tokens found, {most} are known"
        if self.keeps and not spans:
            least = self.stored.longest(text, [])
            least -= least % 16 if self.kind in CUT else 0
            if length < least:
                return f"{length} tokens found, the store has {least}"
        if not length:
            return "" if caches is None else "caches without a hit"
        said = fault_in(caches or [], self.kind, tokens[:length])
        self.use(caches or [])
        return said and f"a hit of {length} tokens: {said}"

    def use(self, caches: list[Any]) -> None:
        """Change caches: what was inserted is the caller's, and what was handed out."""
        for cache in caches:
            if isinstance(cache, (mlx_caches.KVCache, mlx_caches.RotatingKVCache)) and self.rng.random() < 0.2:
                cache.keys[:] = 0
                cache.update_and_fetch(mx.zeros((1, HEADS, 1, WIDTH), mx.uint32), mx.zeros((1, HEADS, 1, WIDTH)))
            if type(cache) is mlx_caches.ArraysCache:
                cache[0][:] = 0
            if type(cache) is Unknown:
                cache.digest = -1

    def fault_in_account(self) -> str:
        """Bytes that are held beside the limit and the account; blocks of the pool beside those of the cache."""
        prompts = self.prompts
        held = held_nbytes(prompts)
        if held != prompts.nbytes or held > prompts.max_bytes:
            return f"{held} bytes are held, {prompts.nbytes} are counted, the limit is {prompts.max_bytes}"
        if len(prompts) > prompts.max_size:
            return f"{len(prompts)} sequences, the limit is {prompts.max_size}"
        pool = prompts._index.pool
        if pool.num_blocks - pool.blocks.num_blank != len(rows_of(prompts)):
            return "the pool has other blocks than the cache"
        return ""


def rows_of(prompts: PromptCache) -> list[mx.array]:
    """The arrays of all blocks in use."""
    return [row for row in prompts._index.rows if row is not None]


def held_nbytes(prompts: PromptCache) -> int:
    """Bytes of every array that a cache holds, and of their index, counted anew."""
    held = [row.nbytes for row in rows_of(prompts) if row.nbytes]
    ends = [one for order in prompts._order.values() for one in order]
    kept = sum(cache.nbytes for one in ends for cache in one.kept)
    return sum(held) + kept + INDEX_NBYTES * (len(held) + sum(one.layout.has_arrays for one in ends))


def threads(seed: int, calls: int, max_bytes: int = 40_000) -> str:
    """Four threads on one cache: every hit is right, and no byte is held above the limit at any time."""
    prompts, peak, findings = PromptCache(max_bytes), [0], []
    kind, trim = random.Random(seed).choice(("dense", "window", "state")), prompts._trim_sequences
    naive = Naive(kind)

    def watched(*arguments: Any) -> None:
        peak[0] = max(peak[0], held_nbytes(prompts))
        trim(*arguments)

    prompts._trim_sequences = watched  # type: ignore[method-assign]

    def talk(number: int) -> None:
        program = Program(seed + number, kind, {"max_bytes": max_bytes})
        program.prompts, program.naive, program.loses = prompts, naive, True
        program.fault_in_account = lambda: ""  # type: ignore[method-assign]
        with ThreadPoolExecutor(1) as own:
            program.fetches = own.submit
            try:
                findings.append(program.run(calls // 4))
            except Exception as exc:
                findings.append(repr(exc))

    begun = [threading.Thread(target=talk, args=(number,)) for number in range(4)]
    for thread in begun:
        thread.start()
    for thread in begun:
        thread.join()
    if peak[0] > max_bytes or not peak[0] or held_nbytes(prompts) != prompts.nbytes:
        findings.append(f"the peak is {peak[0]} bytes, the limit {max_bytes}")
    return next(filter(None, findings), "")


def hunt(seed: int, operations: int, kind: str | None = None) -> str:
    """Run programs one after the other; returns the first finding, or nothing."""
    done = number = 0
    while done < operations:
        each = seed * 1_000_003 + number
        try:
            if number % 10 == 9 and kind is None:
                said, more = threads(each, PROGRAM), PROGRAM
            else:
                program = Program(each, kind)
                said, more = program.run(), program.operations
        except Exception as exc:
            said, more = repr(exc), 0
        if said:
            return f"seed {seed}, program {number}: {said}"
        done, number = done + more, number + 1
    return ""
