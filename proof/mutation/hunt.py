"""Hunt mutants: ``python -m tests.verify.builds mutants -m proof.mutation.hunt``. Runs in the build that has them.

Tapes are recorded from the core as it is, judged by the plain Python model. Then each mutant plays, in a forked child,
the tapes that reach it and runs of the fuzzer, until a judge convicts it, the child dies, or a tape takes far longer
than it should.
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
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kvpool
from kvpool._core import Keys
from kvpool.testing import ModelPlan
from proof.machine.machine import run
from proof.mutation import bound, cached, strained
from proof.mutation.blocks import KeysModel, blocks_by_name, blocks_of_an_engine, keys_of_blocks
from proof.mutation.broken import Poker, safe_pokes, states_that_are_broken
from proof.mutation.embedded import (
    PoolByC,
    Raw,
    ReaderByC,
    ReaderOfModel,
    StatusByC,
    StatusOfModel,
    arrays_that_c_reads,
    statuses_of_every_call,
    what_c_can_get_wrong,
)
from proof.mutation.equivalents import EQUIVALENTS
from proof.mutation.fuzzed import FuzzRun, fuzz_runs
from proof.mutation.grouped import (
    ArenaPlan,
    ArenaPool,
    GroupTape,
    Shown,
    ShownOfModel,
    group_tapes,
    life_with_groups,
    refused_with_groups,
    shared_tails,
)
from proof.mutation.memory import (
    Beyond,
    Guard,
    Memory,
    arrays_and_no_further,
    batches_and_no_further,
    events_that_are_lost,
    groups_that_run_out,
    memory_that_runs_out,
)
from proof.mutation.pending import CORE_ONLY, SCENARIOS
from proof.mutation.refused import Wrong, arguments_of_every_call, words_about_pools
from proof.mutation.source import core_sources
from proof.mutation.tape import Difference, Tape, first_tag, judge
from proof.plain import plain_pool

MUTANTS = Path(__file__).resolve().parent.parent / "mutants.json"
#: Programs that run through the C interface too.
THROUGH_C = (
    *("namespaces_apart", "prompts_of_many_lengths", "rows_that_come_and_go", "steps_that_end_in_every_order"),
    *("calls_behind_a_deferred_close", "batches_with_memory_of_their_own", "many_plans_that_pass_at_once"),
)
EXAMPLES = 10  # of the state machine, on one tape
MEMORY = 4 << 30  # bytes of address space that a child may have
DONE, RAISED = 0, 2  # exit codes
STUCK = 2.0  # seconds in which a child that sleeps does nothing: it waits for itself
CHILD = struct.Struct("qqq")  # tape, whether it was seen there, and whether it was convicted: of one child


def pool_of(*args: Any, **kwargs: Any) -> kvpool.Pool:
    """A pool whose content hashes are the same in every process."""
    return kvpool.Pool(*args, **{"seed": 1} | kwargs)


def pool_by_c(*args: Any, **kwargs: Any) -> PoolByC:
    """The same, whose calls go through C."""
    return PoolByC(*args, **{"seed": 1} | kwargs)


def taped(name: str, kinds: dict[str, Any], program: Callable[..., None], *more: Any) -> Tape:
    """What a program does, on a tape; it is given the classes in the order of `kinds`."""
    tape = Tape(name, kinds)
    first_tag()
    program(*(tape.make(kind) for kind in kinds), *more)
    return tape


def judged(program: Callable[..., None], core: dict[str, Any], model: dict[str, Any]) -> Tape:
    """What a program does with the classes of the core, on a tape that those of the model have judged."""
    tape = taped(program.__name__, core, program)
    judge(tape, taped("the same", model, program))
    return tape


def record(tapes: int, seed: int, quick: bool = False) -> Iterator[Tape]:
    """The scenarios, each on its tape; then `tapes` of the state machine, every other one with a prefix cache.

    `quick` leaves out those on which memory runs out, and those of `cached`: they take longer than all others.
    """
    core: dict[str, Any] = {"Pool": pool_of, "Plan": kvpool.Plan}
    by_c = core | {"Pool": pool_by_c}
    model = {"Pool": plain_pool, "Plan": ModelPlan}
    for program in SCENARIOS:
        tapes_of = [taped(program.__name__, core, program)]
        if program.__name__ in THROUGH_C:
            tapes_of.append(taped(f"{program.__name__}, through C", by_c, program))
        due = None if program.__name__ in CORE_ONLY else taped(program.__name__, model, program)
        for tape in tapes_of:
            if due is not None:
                judge(tape, due)
            yield tape
    c_side = {"Reader": ReaderByC, "Status": StatusByC}
    model_side = {"Reader": ReaderOfModel, "Status": StatusOfModel}
    for program, name in ((arrays_that_c_reads, "Reader"), (statuses_of_every_call, "Status")):
        yield judged(program, by_c | {name: c_side[name]}, model | {name: model_side[name]})
    for changing, kinds in bound.JUDGED.items():
        yield judged(changing, core | kinds, model | kinds)
    for changing, kinds in bound.UNJUDGED.items():
        yield taped(changing.__name__, core | kinds, changing)
    yield judged(arguments_of_every_call, core | {"Wrong": Wrong}, model | {"Wrong": Wrong})
    yield taped("forms that only the core reads", core | {"Wrong": Wrong}, arguments_of_every_call, True)
    for program in (blocks_by_name, blocks_of_an_engine, refused_with_groups):
        yield judged(program, core, model)
    for program in (blocks_by_name, blocks_of_an_engine):
        yield judged(program, {"Pool": ArenaPool, "Plan": ArenaPlan}, model)
    for program in (life_with_groups, shared_tails):
        yield judged(program, core | {"Shown": Shown}, model | {"Shown": ShownOfModel})
    for program, of_core, of_model in strained.programs():
        if quick and program in cached.PROGRAMS:
            continue
        yield judged(program, core | of_core, model | of_model)
    yield judged(keys_of_blocks, {"Keys": Keys}, {"Keys": KeysModel})
    safe = safe_pokes(pool_of, kvpool.Plan)
    yield taped("states_that_are_broken", core | {"Poker": Poker}, states_that_are_broken, safe)
    beside = {
        Guard: arrays_and_no_further,
        Wrong: words_about_pools,
        Beyond: batches_and_no_further,
        Memory: events_that_are_lost,
        Raw: what_c_can_get_wrong,
    }
    for kind, program in beside.items():
        yield taped(program.__name__, core | {kind.__name__: kind}, program)
    if not quick:
        yield taped("groups_that_run_out", core | {"Memory": Memory}, groups_that_run_out)
    for has_cache in () if quick else (False, True):
        yield taped("memory that runs out", core | {"Memory": Memory}, memory_that_runs_out, has_cache)
    for number in range(tapes):
        tape = Tape(f"machine, seed {seed + number // 2}", core)
        first_tag()
        run(
            *(tape.make("Pool"), tape.make("Plan")),
            **{"examples": EXAMPLES, "seed": seed + number // 2, "prefix_cache": number % 2 == 1, "shrink": False},
        )
        tape.judged = True  # the machine compares each call with the model's
        yield tape


class Hunt:
    """Tapes, and the mutants that play them."""

    def __init__(self, tapes: list[Tape | FuzzRun | GroupTape], jobs: int, *, blind: bool = False) -> None:
        self.tapes, self.jobs, self.blind = tapes, jobs, blind
        names = sorted({path.stem for path in core_sources() if path.suffix == ".pyx"})
        self.modules = [importlib.import_module(f"kvpool.{name}") for name in names]
        self.limits: list[float] = []
        self.reached: list[bytes] = []  # of each tape: mutants whose spots it comes by, by number
        for tape in tapes:
            gc.collect()  # pools in circles of errors and frames: there are so many mappings and no more
            self.forget()
            for found in tape.play(learn=True):
                raise RuntimeError(f"[hunt] {tape.name} is not what was recorded: {found}")
            live = self.live_arrays()
            start = time.process_time()
            for found in self.played(tape, live):
                raise RuntimeError(f"[hunt] {tape.name} is not the same twice: {found}")
            self.limits.append(0.3 + 8 * (time.process_time() - start))
            self.reached.append(self.reach())
        self.kills = [0] * len(tapes)
        self.shared = mmap.mmap(-1, CHILD.size * jobs)

    def live_arrays(self) -> int:
        """Arrays of the core that nobody gave back so far."""
        gc.collect()
        return sum(module.live_arrays() for module in self.modules)

    def played(self, tape: Tape | FuzzRun | GroupTape, live: int) -> Iterator[Difference]:
        """What is wrong when a tape is played; arrays that it leaves behind, where there were `live`, are."""
        yield from tape.play(blind=self.blind)
        left = self.live_arrays() - live
        if left and not self.blind:
            yield Difference(tape.judged, None, f"{left} arrays left behind")

    def forget(self) -> None:
        """Nothing was reached yet."""
        for module in self.modules:
            module.forget_reached()

    def reach(self) -> bytes:
        """For each number whether any module came by the mutant's spot."""
        every = [int.from_bytes(module.mutants_reached(), "little") for module in self.modules]
        total = 0
        for reached in every:
            total |= reached
        return total.to_bytes(len(self.modules[0].mutants_reached()), "little")

    def child(self, mutant: dict, place: int, order: list[int]) -> None:
        """In a forked process: be a mutant, play, never return."""
        code, seen, live = RAISED, False, self.live_arrays()
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            for module in self.modules:
                module.set_mutant(mutant["number"])
            for index in order:
                if seen and not self.tapes[index].judged:
                    continue
                CHILD.pack_into(self.shared, CHILD.size * place, index, seen, False)
                signal.setitimer(signal.ITIMER_PROF, self.limits[index])
                for found in self.played(self.tapes[index], live):
                    seen = True
                    CHILD.pack_into(self.shared, CHILD.size * place, index, True, found.convicts)
                    if found.convicts or mutant["aside"]:
                        os._exit(DONE)
                    if not self.tapes[index].judged:
                        break
            code = DONE
        except BaseException:
            code = RAISED
        finally:
            os._exit(code)

    def control(self) -> None:
        """The core as it is must survive what the mutants go through."""
        (end,) = self.run([{"number": 0, "aside": ""}])
        if end["seen"]:
            raise RuntimeError(f"[hunt] the core as it is: {end}")

    def run(self, mutants: list[dict]) -> Iterator[dict]:
        """What became of each mutant, in the order in which they end."""
        running: dict[int, tuple[dict, int]] = {}
        waiting = list(reversed(mutants))
        free = list(range(self.jobs))
        watched: dict[int, tuple[float, int]] = {}  # child -> when it was seen at work last, its CPU time then
        while waiting or running:
            while waiting and free:
                mutant, place = waiting.pop(), free.pop()
                number = mutant["number"]
                order = [i for i, reached in enumerate(self.reached) if reached[number] or not number]
                if not order:
                    free.append(place)
                    yield {"mutant": mutant, "seen": "", "convicted": "", "tape": "", "reached": False}
                    continue
                order.sort(key=lambda i: (-self.kills[i] / self.limits[i], i))
                CHILD.pack_into(self.shared, CHILD.size * place, order[0], False, False)
                pid = os.fork()
                if pid == 0:
                    self.child(mutant, place, order)
                running[pid] = mutant, place
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                self.watch(running, watched)
                time.sleep(0.002)
                continue
            mutant, place = running.pop(pid)
            watched.pop(pid, None)
            free.append(place)
            tape, seen, convicted = CHILD.unpack_from(self.shared, CHILD.size * place)
            died = self.ending(status)
            self.kills[tape] += bool(convicted or died)
            yield {
                "mutant": mutant,
                "seen": died or ("differs" if seen else ""),
                "convicted": died or ("differs" if convicted else ""),
                "tape": self.tapes[tape].name,
                "reached": True,
            }

    @staticmethod
    def watch(running: dict[int, tuple[dict, int]], watched: dict[int, tuple[float, int]]) -> None:
        """End children that wait for what never comes: they sleep, and no other thread could wake them."""
        now = time.monotonic()
        for pid in running:
            since, used = watched.setdefault(pid, (now, -1))
            if now - since < STUCK:
                continue
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            spent = int(fields[11]) + int(fields[12])
            if fields[0] == "S" and spent == used:
                os.kill(pid, signal.SIGKILL)
            watched[pid] = now, spent

    @staticmethod
    def ending(status: int) -> str:
        """What the wait status of a child says, "" where it played to the end."""
        if os.WIFSIGNALED(status):
            kind = signal.Signals(os.WTERMSIG(status))
            return {signal.SIGPROF: "too slow", signal.SIGKILL: "stuck"}.get(kind, f"died ({kind.name})")
        return {DONE: "", RAISED: "raised"}.get(os.WEXITSTATUS(status), "died (exit)")


def chosen(mutants: list[dict], share: float, seed: int) -> list[dict]:
    """Those whose names the seed draws, in its order: a change of the core draws the same ones among what it left
    alone, and a run that is stopped has some of all parts. Of the equivalents, a tenth of the share: nothing stops
    them, so each plays every program to its end.
    """
    drawn = {mutant["number"]: zlib.crc32(f"{seed} {mutant['key']}".encode()) for mutant in mutants}
    shares = {mutant["number"]: share / 10 if mutant["key"] in EQUIVALENTS else share for mutant in mutants}
    picked = [mutant for mutant in mutants if drawn[mutant["number"]] < shares[mutant["number"]] * 2**32]
    return sorted(picked, key=lambda mutant: drawn[mutant["number"]])


def main(argv: list[str] | None = None) -> int:
    """Print one JSON object a line: each mutant's end, then the sum."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of the mutants")
    parser.add_argument("--tapes", type=int, default=40, help="of the state machine")
    parser.add_argument("--quick", action="store_true", help="without the tapes on which memory runs out")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--files", nargs="*", help="names of sources: mutants of these alone")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of mutants")
    parser.add_argument("--blind", action="store_true", help="compare nothing: a killer that must be found out")
    parser.add_argument("--unjudged", action="store_true", help="a judge that convicts nothing")
    parser.add_argument("--record-only", action="store_true", help="make the tapes, hunt nothing; runs in any build")
    options = parser.parse_args(argv)
    tapes = record(options.tapes, options.seed, options.quick)
    if options.record_only:
        print(json.dumps({"operations": sum(len(tape.ops) for tape in tapes)}))
        return 0
    mutants = json.loads(MUTANTS.read_text())
    of_files = [mutant for mutant in mutants if not options.files or Path(mutant["file"]).name in options.files]
    picked = chosen(of_files, options.share, options.seed)
    if options.only:
        picked = [mutant for mutant in mutants if mutant["number"] in options.only]
    start = time.perf_counter()
    tapes = [*tapes, *fuzz_runs(options.seed), *group_tapes(options.seed)]
    for tape in tapes:
        tape.judged &= not options.unjudged
    recorded = time.perf_counter() - start
    judged = sum(tape.judged for tape in tapes)
    counts = {"mutants": len(mutants), "picked": len(picked), "tapes": len(tapes), "judged": judged}
    print(json.dumps(counts | {"recorded": recorded}), flush=True)
    gc.collect()
    gc.freeze()  # what is on the tapes stays; children collect what is theirs
    hunt = Hunt(tapes, options.jobs, blind=options.blind)
    hunt.control()
    for end in hunt.run(picked):
        print(json.dumps(end), flush=True)
    print(json.dumps({"seconds": time.perf_counter() - start}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
