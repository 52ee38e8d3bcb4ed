"""What make, continuous integration and the pinned tools promise."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from tests.engines import lowest, requirements

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EMPTY_ZIP = b"PK\x05\x06" + bytes(18)
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


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


def test_marks_leave_tests_out_of_make_test_and_of_every_run_but_verify(pytestconfig):
    assert float(pytestconfig.getini("timeout")) > 0, "a test that hangs never ends"
    makefile = make("--dry-run", "test", "verify")
    assert '-m "not long and not slow"' in makefile and "-m slow" in makefile
    assert "-m 'not slow'" in PROJECT["tool"]["pytest"]["ini_options"]["addopts"]


def test_every_test_runs_each_night():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    (event,) = workflow[True]["schedule"]  # YAML reads `on` as true
    assert re.fullmatch(r"\d+ \d+ \* \* \*", event["cron"])
    nightly = [job for job in workflow["jobs"].values() if {"run": "make test-all"} in job["steps"]]
    assert len(nightly) == 1 and "'schedule'" in nightly[0]["if"]
    assert "event_name" in workflow["concurrency"]["group"], "a push would cancel it"


def test_frameworks_are_tested_each_night_and_never_by_the_main_command():
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"]["engines"]
    assert "'schedule'" in job["if"] and job["steps"][-1] == {"run": "make test-engines"}
    assert "tests.engines" not in make("--dry-run", "test-all")


def test_oldest_environment_has_the_lower_end_of_each_range():
    oldest = [lowest(one) for one in requirements("serve") if one.startswith("mlx")]
    assert oldest == [
        "mlx==0.31.2; platform_system == 'Darwin'",
        "mlx[cpu]==0.31.2; platform_system == 'Linux'",
        "mlx-lm==0.31.3",
    ]
    assert lowest("torch>=2.13,<3") == "torch==2.13" and requirements("") == ["numpy>=1.26"]


def test_wheels_are_made_for_every_macos_that_mlx_has_wheels_for():
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "wheels.yml").read_text())["jobs"]["wheels"]
    made = job["strategy"]["matrix"]["include"]
    assert [entry["macos"] for entry in made if "macos" in entry] == ["14.0", "15.0", "26.0"]
    releases = PROJECT["tool"]["cibuildwheel"]["macos"]["environment"]["MLX_RELEASES"].split()
    assert version("mlx") in releases


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_to_a_commit(workflow):
    used = re.findall(r"uses: (.*)", workflow.read_text())
    assert used and not [action for action in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}  # v[\d.]+", action)]


@pytest.fixture
def release(tmp_path):
    """The files of a whole release, each with empty modules, and a function that says what a folder lacks."""
    spec = importlib.util.spec_from_file_location("check_release", ROOT / ".ci" / "check_release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "kvpool-1.0.tar.gz").touch()
    for abi in ("cp311", "cp312", "cp313", "cp314", "cp314t"):
        for platform in (
            "manylinux_2_28_x86_64",
            "manylinux2014_aarch64",
            *map("macosx_{}_0_arm64".format, (14, 15, 26)),
        ):
            with zipfile.ZipFile(tmp_path / f"kvpool-1.0-{abi.rstrip('t')}-{abi}-{platform}.whl", "w") as archive:
                extensions = [f"{module.MLX}mlx{n}/_native" for n in range(5)] if "macosx" in platform else []
                for name in (*module.MODULES, *extensions):
                    archive.writestr(f"{name}.{abi}.so", b"")
    return tmp_path, module.problems


def rewrite(wheel, left):
    """Leave the files out of a wheel that have `left` in their names."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if left not in name]
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in names:
            archive.writestr(name, b"")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda folder: rewrite(next(folder.glob("*4t*aarch64*")), "kvpool/_core"), r"l has no kvpool/_core$"),
        (lambda folder: rewrite(next(folder.glob("*cp311-macosx_14*")), "/built/"), r"MLX's extension 0 times, not 5$"),
        (lambda folder: next(folder.glob("*cp314t*x86_64*")).unlink(), r"^no wheel for cp314t on linux_x86_64$"),
        (lambda folder: next(folder.glob("*.tar.gz")).unlink(), r"^0 source distributions, not one$"),
        (lambda folder: (folder / "kvpool-1.0-cp310-cp310-linux_x86_64.whl").write_bytes(EMPTY_ZIP), r"nobody asked"),
    ],
    ids=["no core", "no extension of MLX", "no wheel", "no source", "another wheel"],
)
def test_release_that_lacks_something_is_refused(release, change, found):
    folder, problems = release
    assert problems(folder, "v1.0") == problems(folder) == []
    assert problems(folder, "v1.1") == ["versions ['1.0'], tag v1.1"]
    change(folder)
    assert any(re.search(found, problem) for problem in problems(folder, "v1.0")), problems(folder, "v1.0")


def test_files_are_published_only_after_the_check_and_signed():
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "wheels.yml").read_text())["jobs"]
    assert job["publish"]["needs"] == "check" and set(job["check"]["needs"]) == {"sdist", "wheels"}
    assert job["check"]["steps"][-1]["run"] == "python .ci/check_release.py dist"
    assert job["publish"]["permissions"] == {"id-token": "write"} and "tags/v" in job["publish"]["if"]
    assert job["publish"]["steps"][-1]["with"] == {"attestations": True}


def test_python_releases_tested_are_those_that_wheels_are_built_for():
    matrix = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    (tested,) = re.findall(r"^ +python: \[(.*)\]$", matrix, re.MULTILINE)
    built = re.findall(r"cp3(\d+)-", PROJECT["tool"]["cibuildwheel"]["build"])
    assert {built[0], built[-1]} <= set(re.findall(r"3\.(\d+)", tested))
