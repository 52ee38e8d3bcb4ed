"""Policies of other allocators, simulated, each at a number of bytes. They are written from their sources.

All serve the requests in the order of the trace, at most so many at a time, and compute a prompt at once. Working
states of running requests are in nobody's budget.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from benchmarks.hybrid.fixed_split import Admitted, FixedSplit, Split, States, serve
from benchmarks.replay.trace import Path, Trace

CHUNK = 8192
"""Tokens of a prompt that SGLang computes at a time; a state stays where a chunk ends."""


@dataclass(frozen=True)
class Case:
    """What a policy is measured with.

    Attributes
    ----------
    trace : Trace
    paths : sequence of Path
        In blocks of `block_size` tokens.
    block_size : int
    concurrency : int
    token_nbytes, state_nbytes : int
        Bytes of full attention per token, and of the recurrent states of a sequence.
    window, window_nbytes : int
        Tokens of the windows, and their bytes per token; 0 without.
    """

    trace: Trace
    paths: Sequence[Path]
    block_size: int
    concurrency: int
    token_nbytes: int
    state_nbytes: int
    window: int
    window_nbytes: int


Policy = Callable[[Case, int], int]
"""Hit tokens of a case at so many bytes."""


class _Everywhere(States):
    """A hit may end at every block."""

    def usable(self, path: Path, known: int) -> int:
        return known

    def use(self, path: Path, hit: int) -> None:
        pass

    def take(self, path: Path, hit: int, positions: list[tuple[int, str]]) -> None:
        pass


class _PlainPrefixes(FixedSplit):
    """Whole blocks only, least recently used first."""

    def make_checkpoints(self) -> States:
        return _Everywhere(self.split)


class _ChunkEnds(FixedSplit):
    """States at the ends of chunks too, counted from the hit."""

    def positions(self, prompt: int, hit: int, known: int) -> list[tuple[int, str]]:
        size = self.split.block_size
        found = dict(super().positions(prompt, hit, known))
        for end in range(hit * size + CHUNK, prompt, CHUNK):
            position = end // self.grain * self.grain // size
            if position > hit:
                found.setdefault(position, "C")
        return sorted(found.items())


def full_attention(case: Case, nbytes: int) -> int:
    """A model whose layers all keep every token: no checkpoints, so the most that least recently used can give."""
    blocks = nbytes // (case.block_size * case.token_nbytes)
    split = Split(blocks, 0, case.block_size, case.concurrency)
    return _PlainPrefixes(case.trace, split, case.paths).run()["hit_tokens"]


def every(tokens: int) -> Policy:
    """A state with each block of so many tokens, in one unit (oMLX and others)."""

    def policy(case: Case, nbytes: int) -> int:
        blocks = nbytes // (tokens * case.token_nbytes + case.state_nbytes)
        split = Split(blocks, 0, tokens, case.concurrency)
        return _PlainPrefixes(case.trace, split, _coarser(case, tokens)).run()["hit_tokens"]

    return policy


def sglang(share: float) -> Policy:
    """States in memory of their own, `share` of all: at the end of the prompt, junctions, and ends of chunks."""

    def policy(case: Case, nbytes: int) -> int:
        blocks = int(nbytes * (1 - share)) // (case.block_size * case.token_nbytes)
        split = Split(blocks, int(nbytes * share) // case.state_nbytes, case.block_size, case.concurrency)
        return _ChunkEnds(case.trace, split, case.paths).run()["hit_tokens"]

    return policy


def vllm(tokens: int, pages: int) -> Policy:
    """Recurrent states in one pool of pages of `tokens`: so many `pages` at the last page, and at junctions."""

    def policy(case: Case, nbytes: int) -> int:
        blocks = nbytes // (tokens * case.token_nbytes)
        return OneBudget(blocks, tokens, pages, case.concurrency).run(case.trace, _coarser(case, tokens))

    return policy


def vllm_windows(case: Case, nbytes: int) -> int:
    """One pool of pages; the tail of the windows is kept at the last page, and at junctions."""
    page = case.block_size * case.token_nbytes
    cost = -(-case.block_size * case.window_nbytes // page)
    tail = -(-case.window // case.block_size)
    return OneBudget(nbytes // page, case.block_size, cost, case.concurrency, tail).run(case.trace, case.paths)


def _coarser(case: Case, tokens: int) -> list[Path]:
    """Return the paths in blocks of `tokens`, each named by its last part."""
    parts = tokens // case.block_size
    assert parts * case.block_size == tokens
    return [path[parts - 1 :: parts] for path in case.paths]


class OneBudget:
    """KV and checkpoints in one pool of pages, least recently used first, without a tie between the two.

    Parameters
    ----------
    num_pages : int
    tokens : int
        Of a page.
    cost : int
        Pages of a state, or of the part of a window that is beside a page.
    concurrency : int
        Most requests that run at a time.
    tail : int
        Such parts that a hit needs, up to where it ends.
    """

    def __init__(self, num_pages: int, tokens: int, cost: int, concurrency: int, tail: int = 1) -> None:
        self.blank, self.tokens, self.cost, self.concurrency, self.tail = num_pages, tokens, cost, concurrency, tail
        self.refs = dict[int, int]()
        self.kept = set[int]()
        self.idle = OrderedDict[tuple[str, int], None]()
        self.hit_tokens = 0
        self.grain = 1

    def run(self, trace: Trace, paths: Sequence[Path]) -> int:
        """Play the trace; returns the hit tokens."""
        self.grain = trace.block_size  # nobody could find what is kept where the trace names no tokens
        serve(trace, paths, self.concurrency, self.admit, self.finish)
        return self.hit_tokens

    def admit(self, path: Path, prompt: int, output: int) -> Admitted | None:
        """Take pages for a request, and keep its checkpoints; None: no room."""
        most = path[: (prompt - 1) // self.tokens]
        known = sum(1 for _ in takewhile(self.refs.__contains__, most))
        hit = self._usable(path, known)
        need = -(-(prompt + output) // self.tokens) - hit
        own = sum(("kv", node) in self.idle for node in path)
        idle_kv = len(self.idle) - len(self.kept)
        if need > self.blank + idle_kv - own + self.cost * (len(self.kept) - min(hit, self.tail)):
            return None
        absent = [node for node in path if node not in self.refs]
        for node in path:
            if node in self.refs:
                self.refs[node] += 1
                self.idle.pop(("kv", node), None)
        self._refresh(self._tail(path, hit))
        self._make_room(need)
        self.blank -= need
        self.refs |= dict.fromkeys(absent, 1)
        self.hit_tokens += hit * self.tokens
        for position in sorted({prompt // self.grain * self.grain // self.tokens, known}):
            if position > hit:
                self._keep(self._tail(path, position))
        return Admitted(path, need - len(absent))

    def _usable(self, path: Path, known: int) -> int:
        """Return the largest ``k <= known`` whose whole tail is kept, else 0."""
        run = best = 0
        for k in range(1, known + 1):
            run = run + 1 if path[k - 1] in self.kept else 0
            if run >= min(self.tail, k):
                best = k
        return best

    def _tail(self, path: Path, position: int) -> Path:
        return path[max(0, position - self.tail) : position]

    def _refresh(self, tail: Path) -> None:
        for node in tail:
            if node in self.kept:
                self.idle.move_to_end(("kept", node))

    def _keep(self, tail: Path) -> None:
        self._refresh(tail)
        missing = [node for node in tail if node not in self.kept]
        if self._make_room(self.cost * len(missing)):
            self.blank -= self.cost * len(missing)
            self.kept.update(missing)
            self.idle |= dict.fromkeys(("kept", node) for node in missing)

    def _make_room(self, pages: int) -> bool:
        while self.blank < pages:
            if not self.idle:
                return False
            (kind, node), _ = self.idle.popitem(last=False)
            if kind == "kv":
                del self.refs[node]
                self.blank += 1
            else:
                self.kept.remove(node)
                self.blank += self.cost
        return True

    def finish(self, request: Admitted) -> None:
        """A request has ended; of its pages the deepest one is the oldest."""
        self.blank += request.private
        for node in reversed(request.path):
            self.refs[node] -= 1
            if not self.refs[node]:
                self.idle["kv", node] = None


NEVER = 1 << 60


def clairvoyant(case: Case, nbytes: int) -> int:
    """Full attention that evicts what is used latest from now (Belady), one request at a time: a bound."""
    room = nbytes // (case.block_size * case.token_nbytes)
    next_use = dict[int, int]()
    later = list[list[int]]()
    for row in range(len(case.paths) - 1, -1, -1):
        later.append([next_use.get(node, NEVER) for node in case.paths[row]])
        next_use.update(dict.fromkeys(case.paths[row], row))
    held = dict[int, int]()  # node -> row of its next use
    latest: list[tuple[int, int, int]] = []
    hits = 0
    for row, (path, prompt) in enumerate(zip(case.paths, case.trace.prompts.tolist(), strict=True)):
        hits += sum(1 for _ in takewhile(held.__contains__, path[: (prompt - 1) // case.block_size]))
        for depth, (node, use) in enumerate(zip(path, later[-1 - row], strict=True)):
            if use != NEVER:
                held[node] = use
                heapq.heappush(latest, (-use, -depth, node))
            else:
                held.pop(node, None)
        while len(held) > room:
            use, _, node = heapq.heappop(latest)
            if held.get(node) == -use:
                del held[node]
    return hits * case.block_size
