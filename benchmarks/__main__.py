"""Run the benchmarks and print their tables. ``--gates``: exit status 1 if a target is missed.

Other arguments are pytest's, and choose among the benchmarks of the first tables; then these alone are run.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gate import table

HERE = Path(__file__).parent
STEP_ROWS = (64, 256, 1024)

# Row -> the most ns it may take, and the most times the floor's ns (None: no such target).
LIMITS = {
    "alloc+free, 1..64 blocks a call": (20, 4),
    **{
        f"{step}, {rows} sequences": (500 + 8 * rows, None)
        for step in ("decode step in order", "decode step and done")
        for rows in STEP_ROWS
    },
    **{f"fork of 4k tokens, {children} a call": (500, None) for children in (1, 64)},
    **{f"close of 4k tokens, {children} a call": (700, None) for children in (1, 64)},
    "prefix hit per 1k tokens, 4k prompt, 1,024 blocks": (2_600, None),
    "prefix hit per 1k tokens, 4k prompt, 100,000 blocks": (7_000, None),
    "prefix hit per 1k tokens, 4k prompt, 1,000,000 blocks": (10_000, None),
    "prefix insert per 1k tokens, 4k prompt, 1,024 blocks": (8_000, None),
    "prefix insert per 1k tokens, 4k prompt, 100,000 blocks": (24_000, None),
    "prefix insert per 1k tokens, 4k prompt, 1,000,000 blocks": (40_000, None),
    "prefix miss, per call, 4k prompt, 100,000 blocks": (5_000, None),
    "prompt as a list, per 1k tokens": (5_000, None),
    "prefix churn, per evicted block, 4,096 blocks": (1_000, None),
    "request: 2k prompt, half of it cached, 200 decode steps": (50_000, None),
}


def run_benchmarks(arguments):
    """Run pytest on this folder. Return pytest-benchmark's records as dicts of extra_info."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        command = [
            sys.executable, "-m", "pytest", str(HERE), "-q", "-p", "no:xdist", "--benchmark-quiet",
            f"--benchmark-json={path}", "--timeout=0", *arguments,
        ]  # fmt: skip
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
        status = subprocess.run(command, cwd=HERE.parent, env={**env, "PYTHONHASHSEED": "0"}).returncode
        if status or not path.exists():
            sys.exit(f"benchmarks failed: pytest ended with {status}")
        return [record["extra_info"] for record in json.loads(path.read_text())["benchmarks"]]


def human(ns):
    """Return ns as text of three digits and a unit."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if ns >= size:
            return f"{ns / size:.3g} {unit}"
    return f"{ns:.3g} ns"


def time_lines(records):
    """Return the lines of the rows that are times beside baselines."""
    rows = {}
    for record in records:
        if record["who"] in ("kvpool", "floor", "python") and "index_nbytes" not in record:
            rows.setdefault(record["row"], {})[record["who"]] = record["ns_per_item"]
    for row, ns in rows.items():
        if "kvpool" not in ns:
            continue
        limit, ratio_limit = LIMITS.get(row, (None, None))
        ratio = ns["kvpool"] / ns["floor"] if "floor" in ns else None
        cells = [human(ns[who]) if who in ns else "" for who in ("kvpool", "floor", "python")]
        target = f"<= {human(limit)}" + (f", <= {ratio_limit}x" if ratio_limit else "") if limit else ""
        holds = limit and ns["kvpool"] <= limit and (ratio_limit is None or ratio <= ratio_limit)
        yield row, *cells, f"{ratio:.1f}x" if ratio else "", target, holds


def index_lines(records):
    """Return the line of the index."""
    for record in records:
        if "index_nbytes" in record:
            nbytes, limit = record["index_nbytes"], record["limit_nbytes"]
            yield record["row"], f"{nbytes:.1f}", "", "", "", f"<= {limit}", nbytes <= limit


def main():
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gates", action="store_true", help="exit status 1 if a target is missed")
    options, arguments = parser.parse_known_args()
    records = run_benchmarks(arguments)
    print(f"\n{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}:")
    print("median CPU time per item; the floor is C without checks, its loop inside C\n")
    head = ("operation", "kvpool", "C floor", "Python", "kvpool / floor", "target", "holds")
    lines = [*time_lines(records), *index_lines(records)]
    print(table(head, *([*cells, {None: "", True: "yes", False: "NO"}[held]] for *cells, held in lines)) + "\n")
    holds = all(held is not False for *_, held in lines)
    if not arguments:  # it has a table and gates of its own
        print("benchmarks.eviction:", flush=True)
        holds &= (
            subprocess.run([sys.executable, "-m", "benchmarks.eviction", "--gates"], cwd=HERE.parent).returncode == 0
        )
    print("every target holds" if holds else "A TARGET IS MISSED")
    sys.exit(1 if options.gates and not holds else 0)


if __name__ == "__main__":
    main()
