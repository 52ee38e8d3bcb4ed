"""Prefix caching of a hybrid model with two arenas of fixed sizes, one for KV and one for checkpoints. No pool.

It is the policy that allocators with separate memory for recurrent states have, written down exactly, so that other
programs can be compared with it. Prefill takes no time, a request runs as many steps as its answer has tokens, and
takes all its blocks when it is admitted.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from benchmarks.replay.trace import Path, Trace, paths_of, shareable_blocks


@dataclass(frozen=True)
class Split:
    """The parameters of the policy.

    Attributes
    ----------
    kv_blocks : int
        Blocks of the arena of full attention.
    room : int
        Checkpoints that the other arena holds; with windows, their blocks.
    block_size : int
        Tokens per block.
    concurrency : int
        Most requests that run at a time.
    window_blocks : int
        Blocks of a window; 0: a checkpoint is a recurrent state.
    place : str
        Where checkpoints are taken: E, end of the prompt; J, junction; D, at ``first_distance * 2^j``.
    is_two_class : bool
        Checkpoints of D, and states that were used once by a conversation that has a later one, leave first while they
        are more than a quarter. States only.
    """

    kv_blocks: int
    room: int
    block_size: int
    concurrency: int
    window_blocks: int = 0
    place: str = "EJ"
    first_distance: int = 8192
    is_two_class: bool = False


@dataclass
class Admitted:
    """A request that runs."""

    path: Path
    private: int  # blocks that are in no index: duplicates, the last part of the prompt, the answer


@dataclass
class _State:
    rule: str
    uses: int = 0


class States:
    """The second arena with recurrent states, in the order of their last use."""

    def __init__(self, split: Split) -> None:
        self.split = split
        self.held = OrderedDict[int, _State]()
        self.second_class = OrderedDict[int, None]()
        self.taken = self.used = self.evicted = 0

    def usable(self, path: Path, known: int) -> int:
        """Return the largest ``k <= known`` whose checkpoint is there, else 0."""
        return next((k for k in range(known, 0, -1) if path[k - 1] in self.held), 0)

    def counters(self) -> dict[str, int]:
        """Return what became of the checkpoints."""
        names = ("checkpoints_taken", "checkpoints_used", "checkpoint_evictions")
        return dict(zip(names, (self.taken, self.used, self.evicted), strict=True))

    def use(self, path: Path, hit: int) -> None:
        """The checkpoint at `hit` is the most recent; no other moves."""
        node = path[hit - 1]
        state = self.held[node]
        state.uses += 1
        self.used += state.uses == 1
        self.held.move_to_end(node)
        if node in self.second_class:
            self.second_class.move_to_end(node)
            if state.uses >= 2:
                del self.second_class[node]

    def take(self, path: Path, hit: int, positions: list[tuple[int, str]]) -> None:
        """Take the checkpoints of a request, ascending."""
        for position, rule in positions:
            node = path[position - 1]
            if node in self.held:
                self.held.move_to_end(node)
                continue
            if len(self.held) >= self.split.room and not self._evict():
                continue
            self.held[node] = _State(rule)
            self.taken += 1
            if self.split.is_two_class and rule == "D":
                self.second_class[node] = None
        if self.split.is_two_class and hit and positions:
            self._supersede(path[hit - 1], path[positions[-1][0] - 1])

    def _evict(self) -> bool:
        if not self.held:
            return False
        leaves_first = self.split.is_two_class and len(self.second_class) > self.split.room / 4
        node = next(iter(self.second_class if leaves_first else self.held))
        del self.held[node]
        self.second_class.pop(node, None)
        self.evicted += 1
        return True

    def _supersede(self, used: int, last: int) -> None:
        """The conversation that used a state has a later one."""
        state = self.held.get(used)
        is_spent = state is not None and state.uses <= 1 and state.rule != "J"
        if is_spent and last in self.held and used not in self.second_class:
            self.second_class[used] = None


class WindowBlocks:
    """The second arena with blocks of windows; tails that overlap hold a block once."""

    def __init__(self, split: Split) -> None:
        self.split = split
        self.held = OrderedDict[int, None]()
        self.taken = 0

    def usable(self, path: Path, known: int) -> int:
        """Return the largest ``k <= known`` whose whole tail is there, else 0."""
        run = best = 0
        for k in range(1, known + 1):
            run = run + 1 if path[k - 1] in self.held else 0
            if run >= min(self.split.window_blocks, k):
                best = k
        return best

    def counters(self) -> dict[str, int]:
        """Return how many tails were not there as a whole before they were kept."""
        return {"checkpoints_taken": self.taken}

    def use(self, path: Path, hit: int) -> None:
        """The tail before `hit` is the most recent."""
        for node in self._tail(path, hit):
            self.held.move_to_end(node)

    def take(self, path: Path, hit: int, positions: list[tuple[int, str]]) -> None:
        """Keep the tails of a request, ascending."""
        for position, _ in positions:
            tail = self._tail(path, position)
            missing = sum(node not in self.held for node in tail)
            for node in tail:
                if node in self.held:
                    self.held.move_to_end(node)
            if missing > self.split.room:
                continue
            while len(self.held) + missing > self.split.room:
                self.held.popitem(last=False)
            for node in tail:
                self.held[node] = None
                self.held.move_to_end(node)
            self.taken += missing > 0

    def _tail(self, path: Path, position: int) -> Path:
        return path[max(0, position - self.split.window_blocks) : position]


def serve(
    trace: Trace,
    paths: Sequence[Path],
    concurrency: int,
    admit: Callable[[Path, int, int], Admitted | None],
    finish: Callable[[Admitted], None],
    progress: Callable[[int], None] = lambda done: None,
) -> int:
    """Serve the requests in order, at most `concurrency` at a time; returns how many never fit.

    `admit` gets path, prompt and answer of a request, and says None while there is no room.
    """
    waiting = list(zip(trace.prompts.tolist(), trace.outputs.tolist(), paths, strict=True))[::-1]
    running: list[tuple[int, int, Admitted]] = []
    now = row = rejected = 0
    while waiting or running:
        while waiting and len(running) < concurrency:
            prompt, output, path = waiting[-1]
            admitted = admit(path, prompt, output)
            if admitted is not None:
                heapq.heappush(running, (now + output, row, admitted))
            elif running:
                break
            else:
                rejected += 1
            waiting.pop()
            row += 1
            progress(row)
        if running:
            now, _, ended = heapq.heappop(running)
            finish(ended)
    return rejected


class FixedSplit:
    """The arena of KV blocks, and the requests that run.

    Parameters
    ----------
    trace : Trace
    split : Split
    paths : sequence of Path, optional
        Those of the trace, if somebody has made them already.
    """

    def __init__(self, trace: Trace, split: Split, paths: Sequence[Path] | None = None) -> None:
        self.trace, self.split = trace, split
        self.paths = paths_of(trace, split.block_size) if paths is None else paths
        self.grain = max(trace.block_size, split.block_size)
        """Tokens that a checkpoint's position is a multiple of. A trace names whole blocks only, so a checkpoint
        inside of one could not be found."""
        self.checkpoints = self.make_checkpoints()
        self.blank = split.kv_blocks
        self.refs = dict[int, int]()
        self.idle = OrderedDict[int, None]()
        self.counters = dict.fromkeys(("hit_tokens", "computed_tokens", "admissions", "rejected", "kv_evictions"), 0)

    def make_checkpoints(self) -> States | WindowBlocks:
        """Return the second arena."""
        return WindowBlocks(self.split) if self.split.window_blocks else States(self.split)

    def run(self, progress: Callable[[int], None] = lambda done: None) -> dict[str, int]:
        """Play the trace; returns the counters."""
        self.counters["rejected"] = serve(
            self.trace, self.paths, self.split.concurrency, self.admit, self.finish, progress
        )
        shareable = sum(shareable_blocks(self.trace, self.paths, self.split.block_size)) * self.split.block_size
        return {
            "prompt_tokens": int(self.trace.prompts.sum()),
            "shareable_tokens": shareable,
            **self.counters,
            **self.checkpoints.counters(),
        }

    def admit(self, path: Path, prompt: int, output: int) -> Admitted | None:
        """Take blocks for a request, and its checkpoints; None: it does not fit now."""
        size = self.split.block_size
        known = sum(1 for _ in takewhile(self.refs.__contains__, path[: (prompt - 1) // size]))
        hit = self.checkpoints.usable(path, known)
        need = -(-(prompt + output) // size) - hit
        if need > self.blank + len(self.idle) - sum(node in self.idle for node in path):
            return None
        absent = [node for node in path if node not in self.refs]
        self._hold(node for node in path if node in self.refs)
        while self.blank < need:
            node, _ = self.idle.popitem(last=False)
            del self.refs[node]
            self.blank += 1
            self.counters["kv_evictions"] += 1
        self.blank -= need
        self.refs |= dict.fromkeys(absent, 1)
        self.counters["hit_tokens"] += hit * size
        self.counters["computed_tokens"] += prompt - hit * size
        self.counters["admissions"] += 1
        if hit:
            self.checkpoints.use(path, hit)
        self.checkpoints.take(path, hit, self.positions(prompt, hit, known))
        return Admitted(path, need - len(absent))

    def positions(self, prompt: int, hit: int, known: int) -> list[tuple[int, str]]:
        """Return where the checkpoints of a request lie, in blocks, and by which rule, ascending."""
        size, found = self.split.block_size, dict[int, str]()
        at = {"E": [prompt // size * size], "J": [known * size], "D": list(self._distances(prompt))}
        for rule in (rule for rule in "EJD" if rule in self.split.place):
            for tokens in at[rule]:
                found.setdefault(tokens // self.grain * self.grain // size, rule)
        return sorted((position, rule) for position, rule in found.items() if position > hit)

    def _distances(self, prompt: int) -> Iterable[int]:
        distance = self.split.first_distance
        while distance <= prompt:
            yield distance
            distance *= 2

    def _hold(self, nodes: Iterable[int]) -> None:
        for node in nodes:
            self.refs[node] += 1
            self.idle.pop(node, None)

    def finish(self, request: Admitted) -> None:
        """A request has ended; of its nodes the deepest one is the oldest."""
        self.blank += request.private
        for node in reversed(request.path):
            self.refs[node] -= 1
            if not self.refs[node]:
                self.idle[node] = None
