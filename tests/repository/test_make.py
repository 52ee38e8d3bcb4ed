"""What make, continuous integration and the pinned tools promise."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def make(*arguments, **environment):
    """Run make in the project's folder and return what it prints."""
    result = subprocess.run(
        ["make", *arguments], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_help_lists_every_documented_target():
    targets = re.findall(r"^([a-z-]+):.*?## (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [tuple(line.split(None, 2)[1:]) for line in make("help").splitlines()] == targets
    assert {"demo", "test", "bench", "clean"} <= dict(targets).keys()


def test_recipes_do_not_see_which_core_a_shell_has_chosen(tmp_path):
    """``KVPOOL_CORE=model`` left set must not make ``make test`` test the model in place of the core."""
    makefile = tmp_path / "Makefile"
    makefile.write_text(f'include {ROOT}/Makefile\nshow:\n\t@echo "$$KVPOOL_CORE,$$KVPOOL_BACKEND"\n')
    assert make("-f", str(makefile), "show", KVPOOL_CORE="model", KVPOOL_BACKEND="numpy") == ",numpy\n"


def collected(*arguments):
    """Names of the tests that pytest would run, of a folder that is long and a file that is not."""
    places = ("tests/store/test_store_server.py", "tests/core/test_cow.py")
    command = [sys.executable, "-m", "pytest", "--co", "-q", "-p", "no:xdist", *arguments, *places]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return {line for line in result.stdout.splitlines() if "::" in line}


def test_share_draws_of_the_long_tests_alone_and_repeats_a_draw():
    every, none = collected(), collected("--share", "0")
    short = {name for name in every if "test_cow" in name}
    assert none == short < every
    drawn = collected("--share", "1/2", "--share-seed", "a")
    assert drawn == collected("--share", "1/2", "--share-seed", "a") != collected("--share", "1/2", "--share-seed", "b")
    assert short < drawn < every and 0.2 < len(drawn - short) / len(every - short) < 0.8


def test_marks_leave_tests_out_of_make_test_and_of_every_run_but_verify():
    makefile = make("--dry-run", "test", "verify")
    assert '-m "not long and not slow"' in makefile and "-m slow" in makefile
    assert "-m 'not slow'" in PROJECT["tool"]["pytest"]["ini_options"]["addopts"]


def jobs(workflow):
    """Return name -> text of every job of a workflow."""
    text = workflow.read_text().partition("\njobs:\n")[2]
    names = re.findall(r"^  ([\w-]+):$", text, re.MULTILINE)
    return dict(zip(names, re.split(r"^  [\w-]+:$", text, flags=re.MULTILINE)[1:], strict=True))


def test_every_test_runs_each_night():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    (event,) = workflow[True]["schedule"]  # YAML reads `on` as true
    assert re.fullmatch(r"\d+ \d+ \* \* \*", event["cron"])
    nightly = [job for job in workflow["jobs"].values() if {"run": "make test-all"} in job["steps"]]
    assert len(nightly) == 1 and "'schedule'" in nightly[0]["if"]
    assert "event_name" in workflow["concurrency"]["group"], "a push would cancel it"


def test_wheels_are_made_for_every_macos_that_mlx_has_wheels_for():
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "wheels.yml").read_text())["jobs"]["wheels"]
    macs = {entry["os"]: entry["macos"] for entry in job["strategy"]["matrix"]["include"] if "macos" in entry}
    assert macs == {f"macos-{release}": f"{release}.0" for release in (14, 15, 26)}
    (loop,) = [line for line in PROJECT["tool"]["cibuildwheel"]["macos"]["before-build"] if "native ship" in line]
    releases = re.findall(r"0\.\d+\.\d+", loop)
    (wanted,) = [line for line in PROJECT["project"]["optional-dependencies"]["mlx"] if "Darwin" in line]
    assert releases[0] in wanted and version("mlx") in releases


def test_every_test_ends(pytestconfig):
    assert float(pytestconfig.getini("timeout")) > 0


def test_python_releases_tested_are_those_that_wheels_are_built_for():
    matrix = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    (tested,) = re.findall(r"^ +python: \[(.*)\]$", matrix, re.MULTILINE)
    built = re.findall(r"cp3(\d+)-", PROJECT["tool"]["cibuildwheel"]["build"])
    assert {built[0], built[-1]} <= set(re.findall(r"3\.(\d+)", tested))


def test_adapter_takes_the_mlx_lm_that_is_installed():
    pytest.importorskip("mlx_lm")
    from mlx_models import tiny_llama

    from kvpool.adapters.mlx_lm import install

    assert install(tiny_llama(), 16).num_layers == 3
