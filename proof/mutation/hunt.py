"""Kill mutants: ``python -m proof.builds mutants -m proof.mutation.hunt``. Runs in the build that has them.

Tapes are recorded from the core as it is, judged by the plain Python model. Then each mutant plays them in a forked
child, until something differs, the child dies, or a tape takes twenty times as long as it should: the mutant is killed.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import mmap
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kvpool
from kvpool.testing import run
from proof.mutation.evictions import SCENARIOS
from proof.mutation.memory import (
    Beyond,
    Guard,
    Memory,
    arrays_and_no_further,
    batches_and_no_further,
    events_that_are_lost,
    memory_that_runs_out,
)
from proof.mutation.tape import Differs, Tape, first_tag, play

MUTANTS = Path(__file__).resolve().parent.parent / "mutants.json"
EXAMPLES = 10  # of the state machine, on one tape
MEMORY = 4 << 30  # bytes of address space that a child may have
SURVIVED, DIFFERS, RAISED = 0, 1, 2  # exit codes


def pool_of(*args: Any, **kwargs: Any) -> kvpool.Pool:
    """A pool whose content hashes are the same in every process."""
    return kvpool.Pool(*args, **{"seed": 1} | kwargs)


def record(tapes: int, seed: int, quick: bool = False) -> Iterator[Tape]:
    """The scenarios, each on its tape; then `tapes` of the state machine, every other one with a prefix cache.

    `quick` leaves out those on which memory runs out: they take longer than all others.
    """
    kinds = {"Pool": pool_of, "Plan": kvpool.Plan, "Memory": Memory, "Guard": Guard, "Beyond": Beyond}
    for program in SCENARIOS:
        tape = Tape(program.__name__, kinds)
        first_tag()
        program(tape.make("Pool"), tape.make("Plan"))
        yield tape
    beside = {"Guard": arrays_and_no_further, "Beyond": batches_and_no_further, "Memory": events_that_are_lost}
    for kind, program in beside.items():
        tape = Tape(program.__name__, kinds)
        first_tag()
        program(tape.make("Pool"), tape.make("Plan"), tape.make(kind))
        yield tape
    for cached in () if quick else (False, True):
        tape = Tape("memory that runs out", kinds)
        first_tag()
        memory_that_runs_out(tape.make("Pool"), tape.make("Plan"), tape.make("Memory"), cached)
        yield tape
    for number in range(tapes):
        tape = Tape(f"machine, seed {seed + number // 2}", kinds)
        first_tag()
        run(
            *(tape.make("Pool"), tape.make("Plan")),
            **{"examples": EXAMPLES, "seed": seed + number // 2, "prefix_cache": number % 2 == 1, "shrink": False},
        )
        yield tape


class Hunt:
    """Tapes, and the mutants that play them."""

    def __init__(self, tapes: list[Tape], blind: bool = False) -> None:
        self.tapes, self.blind = tapes, blind
        self.modules = [
            importlib.import_module(f"kvpool.{path.name.partition('.')[0]}")
            for path in Path(kvpool.__file__).parent.glob("_*.so")
            if not path.name.startswith("_memory.")  # where failures are made
        ]
        self.limits = []
        for tape in tapes:
            play(tape, learn=True)
            start = time.process_time()
            play(tape)
            self.limits.append(0.1 + 20 * (time.process_time() - start))
        self.kills = [0] * len(tapes)
        self.shared = mmap.mmap(-1, 8 * 64)  # which tape a child is at, by its place among the children

    def child(self, number: int, place: int, order: list[int]) -> None:
        """In a forked process: be mutant `number`, play, never return."""
        code = DIFFERS
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            signal.alarm(120)  # should it sleep
            for module in self.modules:
                module.set_mutant(number)
            for index in order:
                struct.pack_into("q", self.shared, 8 * place, index)
                signal.setitimer(signal.ITIMER_PROF, self.limits[index])
                play(self.tapes[index], blind=self.blind)
            code = SURVIVED
        except Differs:
            pass
        except BaseException:
            code = RAISED
        finally:
            os._exit(code)

    def control(self) -> None:
        """The core as it is must survive what the mutants go through."""
        ((_, how, tape),) = self.run([{"number": 0}], 1)
        if how != "survived":
            raise RuntimeError(f"[hunt] the core as it is: {how}, on {tape}")

    def run(self, mutants: list[dict], jobs: int) -> Iterator[tuple[dict, str, str]]:
        """(mutant, how it ended, on which tape), in the order in which they end."""
        running: dict[int, tuple[dict, int]] = {}
        waiting = list(reversed(mutants))
        free = list(range(jobs))
        while waiting or running:
            while waiting and free:
                mutant, place = waiting.pop(), free.pop()
                order = sorted(range(len(self.tapes)), key=lambda i: (-self.kills[i] / self.limits[i], i))
                pid = os.fork()
                if pid == 0:
                    self.child(mutant["number"], place, order)
                running[pid] = mutant, place
            pid, status = os.wait()
            mutant, place = running.pop(pid)
            free.append(place)
            (tape,) = struct.unpack_from("q", self.shared, 8 * place)
            how = self.ending(status)
            self.kills[tape] += how != "survived"
            yield mutant, how, self.tapes[tape].name

    @staticmethod
    def ending(status: int) -> str:
        """What the wait status of a child says."""
        if os.WIFSIGNALED(status):
            late = os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGALRM)
            return "too slow" if late else f"died ({signal.Signals(os.WTERMSIG(status)).name})"
        return {SURVIVED: "survived", DIFFERS: "differs", RAISED: "raised"}.get(os.WEXITSTATUS(status), "died (exit)")


def chosen(mutants: list[dict], share: float, seed: int) -> list[dict]:
    """All of them, or every n-th from the seed on."""
    step = max(1, round(1 / share))
    return mutants[seed % step :: step]


def main(argv: list[str] | None = None) -> int:
    """Print one JSON object a line: each mutant's end, then the sum."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of the mutants")
    parser.add_argument("--tapes", type=int, default=40, help="of the state machine")
    parser.add_argument("--quick", action="store_true", help="without the tapes on which memory runs out")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of mutants")
    parser.add_argument("--blind", action="store_true", help="compare nothing: a killer that must be found out")
    parser.add_argument("--record-only", action="store_true", help="make the tapes, hunt nothing; runs in any build")
    options = parser.parse_args(argv)
    tapes = record(options.tapes, options.seed, options.quick)
    if options.record_only:
        print(json.dumps({"operations": sum(len(tape.ops) for tape in tapes)}))
        return 0
    mutants = json.loads(MUTANTS.read_text())
    picked = chosen(mutants, options.share, options.seed)
    if options.only:
        picked = [mutant for mutant in mutants if mutant["number"] in options.only]
    start = time.perf_counter()
    tapes = list(tapes)
    recorded = time.perf_counter() - start
    print(json.dumps({"mutants": len(mutants), "picked": len(picked), "recorded": recorded}), flush=True)
    gc.collect()
    gc.freeze()  # what is on the tapes stays; children collect what is theirs
    hunt = Hunt(tapes, options.blind)
    hunt.control()
    for mutant, how, tape in hunt.run(picked, options.jobs):
        print(json.dumps({"mutant": mutant, "how": how, "tape": tape}), flush=True)
    print(json.dumps({"seconds": time.perf_counter() - start}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
