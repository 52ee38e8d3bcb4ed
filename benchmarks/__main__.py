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

HERE = Path(__file__).parent
STEP_ROWS = (64, 256, 1024)
IMPORT_MS_MAX = 150
WHEEL_MB_MAX = 1.5
PROGRAMS = ("benchmarks.eviction",)  # with tables and gates of their own

# Row -> the most ns it may take, and the most times the floor's ns (None: no such target).
LIMITS = {
    "alloc+free, 1..64 blocks a call": (20, 4),
    "alloc, one block a call": (100, None),
    **{
        f"{step}, {rows} sequences": (500 + 8 * rows, None)
        for step in ("decode step in order", "decode step and done")
        for rows in STEP_ROWS
    },
    "decode step from C, 64 sequences": (900, 1.2),  # the floor is the core's own loop
    "decode step and done from C, 64 sequences": (1_000, None),
    **{f"fork of 4k tokens, {children} a call": (500, None) for children in (1, 64)},
    **{f"close of 4k tokens, {children} a call": (700, None) for children in (1, 64)},
    "prefix hit per 1k tokens, 4k prompt, 1,024 blocks": (2_600, None),
    **{f"prefix hit per 1k tokens, {k}k prompt, 100,000 blocks": (7_000, None) for k in (4, 32)},
    **{f"prefix hit per 1k tokens, {k}k prompt, 1,000,000 blocks": (10_000, None) for k in (4, 32)},
    "prefix insert per 1k tokens, 4k prompt, 1,024 blocks": (8_000, None),
    "prefix insert per 1k tokens, 4k prompt, 100,000 blocks": (24_000, None),
    "prefix insert per 1k tokens, 4k prompt, 1,000,000 blocks": (40_000, None),
    "prefix miss, per call, 4k prompt, 100,000 blocks": (5_000, None),
    "prompt as a list, per 1k tokens": (5_000, None),
    "prefix churn, per evicted block, 4,096 blocks": (1_000, None),
    "request: 2k prompt, half of it cached, 200 decode steps": (50_000, None),
}
OTHER_LINES = {"nbytes", "import", "index_nbytes"}  # they have lines of their own


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


def line(name, values, target="", holds=None):
    """Return one line of the table; `values` are kvpool's, the floor's and Python's cell."""
    verdict = {None: "", True: "yes", False: "NO"}[holds]
    return (name, *values, target, verdict)


def time_lines(records):
    """Return the lines of the rows that are times beside baselines."""
    rows = {}
    for record in records:
        if record["who"] in ("kvpool", "floor", "python") and not OTHER_LINES & record.keys():
            rows.setdefault(record["row"], {})[record["who"]] = record["ns_per_item"]
    for row, ns in rows.items():
        if "kvpool" not in ns:
            continue
        limit, ratio_limit = LIMITS.get(row, (None, None))
        ratio = ns["kvpool"] / ns["floor"] if "floor" in ns else None
        cells = [human(ns[who]) if who in ns else "" for who in ("kvpool", "floor", "python")]
        cells.append(f"{ratio:.1f}x" if ratio else "")
        holds = None
        target = ""
        if limit:
            target = f"<= {human(limit)}" + (f", <= {ratio_limit}x" if ratio_limit else "")
            holds = ns["kvpool"] <= limit and (ratio_limit is None or ratio <= ratio_limit)
        yield line(row, cells, target, holds)


def fixed_lines(records):
    """Return the lines of the import and the wheel."""
    ns = {record["import"]: record["ns_per_item"] for record in records if "import" in record}
    if ns:
        nothing, numpy, kvpool = (ns[what] for what in ("nothing", "numpy", "kvpool"))
        cells = [
            f"{(kvpool - nothing) / 1e6:.0f} ms",
            "",
            f"{(numpy - nothing) / 1e6:.0f} ms (numpy alone)",
            "",
        ]
        holds = kvpool - nothing <= IMPORT_MS_MAX * 1e6
        yield line("import kvpool, numpy included", cells, f"<= {IMPORT_MS_MAX} ms", holds)
    for record in records:
        if "index_nbytes" in record:
            nbytes, limit = record["index_nbytes"], record["limit_nbytes"]
            yield line(record["row"], [f"{nbytes:.1f}", "", "", ""], f"<= {limit}", nbytes <= limit)
        if "nbytes" in record:
            cells = [f"{record['nbytes'] / 1e6:.2f} MB", "", "", ""]
            yield line("wheel", cells, f"<= {WHEEL_MB_MAX} MB", record["nbytes"] <= WHEEL_MB_MAX * 1e6)


def print_table(head, lines):
    """Print a Markdown table whose columns are aligned; return whether no line says NO."""
    lines = list(lines)
    if lines:
        widths = [max(len(row[column]) for row in [head, *lines]) for column in range(len(head))]
        for row in [head, tuple("-" * width for width in widths), *lines]:
            print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
        print()
    return all(row[-1] != "NO" for row in lines)


def run_programs():
    """Run `PROGRAMS`, which print their tables; return whether every target holds."""
    holds = True
    for name in PROGRAMS:
        print(f"{name}:", flush=True)
        holds &= subprocess.run([sys.executable, "-m", name, "--gates"], cwd=HERE.parent).returncode == 0
        print()
    return holds


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
    holds = print_table(head, [*time_lines(records), *fixed_lines(records)])
    holds &= bool(arguments) or run_programs()
    print("every target holds" if holds else "A TARGET IS MISSED")
    sys.exit(1 if options.gates and not holds else 0)


if __name__ == "__main__":
    main()
