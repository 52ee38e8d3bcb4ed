"""A hunt in several processes."""

from __future__ import annotations

import functools
import multiprocessing
import queue
from typing import Any

import kvpool
from kvpool.cli.console import CommandError
from kvpool.cli.fuzz import Progress
from proof.fuzz._broken import broken
from proof.fuzz._broken_groups import broken_groups
from proof.fuzz.hunt import hunt
from proof.fuzz.shape import big_shape, draw_group_shape, draw_shape

LARGE_CALLS_PER_RUN = 20_000_000
LARGE_CHECK_EVERY = 2_000_000


def hunt_job(seed: int, job: int, fault: str | None, sizes: dict[str, Any], limit: dict[str, Any], told: Any) -> Any:
    """One process's share. `told` gets (calls, runs) now and then."""
    make_pool: Any = kvpool.Pool
    if fault is not None:
        make_pool = broken_groups(fault) if sizes.get("groups") else broken(fault)
    if sizes.get("large"):
        calls = min(limit["calls"] or LARGE_CALLS_PER_RUN, LARGE_CALLS_PER_RUN)
        some: dict[str, Any] = {"calls_per_run": calls, "check_every": LARGE_CHECK_EVERY}
        report = hunt(seed, job=job, make_pool=make_pool, make_shape=big_shape, told=told, **limit, **some)
        return report, make_pool
    shape = draw_group_shape if sizes.get("groups") else functools.partial(draw_shape, **sizes)
    report = hunt(seed, job=job, make_pool=make_pool, make_shape=shape, told=told, **limit)
    return report, make_pool


def _job(results: Any, progress: Any, job: int, options: dict[str, Any]) -> None:
    """Body of a process."""

    def told(report: Any) -> None:
        progress[2 * job], progress[2 * job + 1] = report.calls, report.seed or 0

    report, _ = hunt_job(job=job, told=told, **options)
    results.put((job, report))


def run_jobs(jobs: int, quiet: bool, options: dict[str, Any]) -> list[Any]:
    """Reports of all processes; the first finding ends them all."""
    if jobs == 1:
        told = None if quiet else Progress(options["limit"])
        return [hunt_job(job=0, told=told, **options)[0]]
    context = multiprocessing.get_context("spawn")
    results, progress = context.Queue(), context.RawArray("q", 2 * jobs)
    share = {**options, "limit": dict(options["limit"])}
    if share["limit"]["calls"] is not None:
        share["limit"]["calls"] = -(-share["limit"]["calls"] // jobs)
    processes = [context.Process(target=_job, args=(results, progress, job, share)) for job in range(jobs)]
    shown = None if quiet else Progress(options["limit"])
    for process in processes:
        process.start()
    reports: dict[int, Any] = {}
    try:
        while len(reports) < jobs:
            try:
                job, report = results.get(timeout=0.2)
                reports[job] = report
                if report.finding is not None:
                    break
            except queue.Empty:
                for job, process in enumerate(processes):
                    if job not in reports and process.exitcode not in (None, 0):
                        raise CommandError(
                            f"process {job} died ({process.exitcode}) after the run of seed {progress[2 * job + 1]}"
                        ) from None
            if shown is not None:
                shown.show(sum(progress[2 * job] for job in range(jobs)))
    finally:
        for process in processes:
            if process.exitcode is None and process.is_alive():
                process.terminate()
            process.join()
    return list(reports.values())
