"""The ``kvpool`` command: what it prints, what it refuses, and how it exits."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import pytest
from configs import LLAMA_8B

import kvpool
from kvpool.cli import main
from kvpool.errors import install_command


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    return path


def without(packages: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process in which some packages are not installed."""
    hide = f"sys.modules.update(dict.fromkeys({packages.split()}))"
    code = f"import sys; {hide}; from kvpool.cli import main; sys.exit(main({list(argv)}))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def doctor(capsys) -> tuple[dict, dict[str, str]]:
    """What ``kvpool doctor`` says: its JSON, and the lines of its text by their names."""
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert main(["doctor"]) == 0
    lines = re.findall(r"^(\S+(?: \S+)*)  +(.*)$", capsys.readouterr().out, re.MULTILINE)
    return facts, dict(lines)


def refusal(capsys, *argv: str) -> str:
    """Run a command that must be refused; return what it said, after checking that it reads well."""
    status: object
    try:
        status = main(argv)
    except SystemExit as exc:  # argparse's way out
        status = exc.code
    out, err = capsys.readouterr()
    assert status == 2
    assert out == ""
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize("command", ["", "demo", "plan", "doctor", "bench"])
def test_help_exits_zero_and_lists_exactly_the_commands_that_exist(capsys, command):
    with pytest.raises(SystemExit) as exit_info:
        main([*command.split(), "--help"])
    assert exit_info.value.code == 0
    out = capsys.readouterr().out
    commands = ["demo", "generate", "serve", "plan", "store", "doctor", "bench", "fuzz"]
    assert "--json" in out if command else re.findall(r"^    (\w+)", out, re.MULTILINE) == commands


def test_help_without_optional_packages_works():
    result = without("mlx mlx_lm rich matplotlib kvpool_backends", "demo", "--help")
    assert result.returncode == 0 and "--kv-block-size" in result.stdout, result.stderr


def test_doctor_without_mlx_says_why_and_still_succeeds():
    result = without("mlx", "doctor", "--json")
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts["metal"]["available"] is False and "mlx" in facts["metal"]["reason"]
    assert "pip install" in facts["backends"]["mlx"] and facts["backends"]["numpy"] is None
    assert facts["mlx_route"] is None


@pytest.mark.parametrize("command", ["generate --model tiny", "bench", "doctor"])
def test_unknown_argument_prints_the_usage_of_its_command(capsys, command):
    said = refusal(capsys, *command.split(), "--bogus")
    name = command.partition(" --")[0]
    assert said.startswith(f"usage: kvpool {name} [-h]") and f"kvpool {name}: error: unrecognized" in said


@pytest.mark.parametrize("words", [["-m", "kvpool", "doctor"], ["-um", "kvpool", "store", "ls", "."]])
def test_reader_that_goes_away_leaves_no_traceback(tmp_path, words):
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run([sys.executable, *words], cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert result.returncode == 1
    assert result.stderr == ""


def test_plan_json_gives_the_numbers_of_a_known_model(capsys, config):
    assert main(["plan", "--model", str(config), "--memory", "16GiB", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    # 2 (k, v) * 32 layers * 8 heads * 128 * 2 bytes = 128 KiB per token, 2 MiB per block of 16
    assert facts["token_nbytes"] == 131072
    assert facts["block_nbytes"] == 2 * 2**20
    assert facts["num_blocks"] == 8192
    assert facts["breakdown"] == [{"what": "memory for the KV pool", "nbytes": 16 * 2**30}]
    assert main(["plan", "--model", str(config.parent), "--memory", str(16 * 2**30), "--block-size", "32"]) == 0
    assert "one block of 32 tokens: 4.00 MiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--memory", "much"], "'much'"),
        (["--memory", "16GiB", "--block-size", "0"], "--block-size 0: out of range, 1..2147483647"),
        (["--memory", "16GiB", "--block-size", "many"], "--block-size many: not a whole number"),
        (["--memory", "16GiB", "--dtype", "int3"], "--dtype int3: not one of float32, "),
        (["--memory", "16GiB", "--max-len", "-1"], "--max-len -1: out of range"),
        (["--memory", "16GiB", "--kv-bits", "8", "--dtype", "float8_e4m3"], "(--k-bits 8, --v-bits 8), choose another"),
        (["--memory", "1MiB"], "no usable block"),
        (["--memory", "99999999999999999999TiB"], "the limit is 2^63 - 1 bytes"),
    ],
)
def test_plan_bad_value_is_named(capsys, config, options, said):
    assert said in refusal(capsys, "plan", "--model", str(config), *options)


def test_plan_tiny_is_the_model_of_generate(capsys):
    pytest.importorskip("mlx_lm")
    assert main(["plan", "--model", "tiny", "--memory", "1MiB", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["token_nbytes"] == 2 * 3 * 2 * 32 * 4  # k, v; layers; heads; dim; bytes
    assert {group["dtype"] for group in facts["groups"]} == {"float32"}


def test_install_command_names_the_source_tree_where_kvpool_is_not_installed(monkeypatch):
    assert install_command("mlx") == "pip install 'kvpool[mlx]'"

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    assert install_command("mlx") == f"pip install '{Path(kvpool.__file__).parents[1]}[mlx]'"


def test_plan_missing_or_broken_config_is_named(capsys, tmp_path):
    missing = tmp_path / "nowhere.json"
    said = refusal(capsys, "plan", "--model", str(missing), "--memory", "1GiB")
    assert f"--model {missing}: no such file or folder, nor a model in" in said
    broken = tmp_path / "broken.json"
    no_dtype = json.dumps({name: value for name, value in LLAMA_8B.items() if name != "torch_dtype"}).encode()
    for content, said in (
        (b"{", f"{broken} is not JSON"),
        (b"\xff\xfe\x00", f"{broken} is not JSON"),
        (b"[" * 100_000, f"{broken} is nested too deeply"),
        (no_dtype, "--dtype='bfloat16'"),
    ):
        broken.write_bytes(content)
        assert said in refusal(capsys, "plan", "--model", str(broken), "--memory", "1GiB")


def test_doctor_tells_versions_backends_and_memory(capsys):
    facts, lines = doctor(capsys)
    assert facts["python"] == sys.version.split()[0] and facts["packages"]["numpy"] == lines["numpy"] == np.__version__
    assert facts["core"]["compiled"] is True and lines["core"].startswith("compiled, ")
    assert facts["backends"]["numpy"] is None and lines["backend numpy"] == "works"
    assert isinstance(facts["metal"]["available"], bool)
    memory = facts["memory"]
    assert 0 < memory["available_nbytes"] <= memory["total_nbytes"]
    assert 0 <= memory["cache_nbytes"] <= max(0, memory["available_nbytes"] - memory["keep_free_nbytes"])
    assert lines["serve --memory"].startswith("auto grows up to ")


class Kernels:
    """What `kvpool doctor` asks the CPU kernels."""

    def isas(self):
        return ("portable", "avx2")

    def tilings(self):
        rest = {"tokens": 32, "queries": 4, "vectors": 2, "layout": "HND"}
        return {"portable": {"keys": 2, **rest}, "avx2": {"keys": 3, **rest}}

    def default_isa(self):
        return "portable"

    def num_threads(self):
        return 3


@pytest.mark.parametrize("is_forced", [True, False])
def test_doctor_tells_what_the_cpu_kernels_run_with_and_why(capsys, monkeypatch, is_forced):
    monkeypatch.setitem(sys.modules, "kvpool_backends.cpu._kernels", Kernels())
    for name, value in (("KVPOOL_CPU_ISA", "portable"), ("KVPOOL_NUM_THREADS", "3")):
        monkeypatch.setenv(name, value if is_forced else "")
    facts, lines = doctor(capsys)
    cpu = facts["cpu"]
    assert (cpu["isas"], cpu["other_isas"], cpu["isa"]) == (["portable", "avx2"], ["avx512", "neon"], "portable")
    assert cpu["num_threads"] == 3
    assert (cpu["isa_from"] == "KVPOOL_CPU_ISA") == is_forced
    assert (cpu["num_threads_from"] == "KVPOOL_NUM_THREADS") == is_forced
    assert cpu["huge_pages"] in ("always", "madvise", "never", None)
    assert lines["CPU kernels"].startswith("portable, ") and lines["CPU threads"].startswith("3, ")
    assert "portable 2 x 4 HND, avx2 3 x 4 HND; tiles of 32" in lines["CPU decode"]
    monkeypatch.setitem(sys.modules, "kvpool_backends.cpu._kernels", None)
    facts, lines = doctor(capsys)
    assert facts["cpu"]["available"] is False and "_kernels" in facts["cpu"]["reason"]
    assert lines["CPU kernels"].startswith("no: ")


@pytest.mark.parametrize(
    ("reason", "has_metal", "route", "said"),
    [
        (None, False, "kernels", "CPU kernels"),
        ("MLX computes on Device(gpu, 0)", False, "plain", "MLX computes on Device(gpu, 0)"),
        ("MLX computes on Device(gpu, 0)", True, "metal", "Metal kernels"),
    ],
)
def test_doctor_tells_the_route_of_the_mlx_backend(capsys, monkeypatch, reason, has_metal, route, said):
    backend = pytest.importorskip("kvpool_backends.mlx.base")
    monkeypatch.setattr(backend, "kernels_refusal", lambda: reason)
    monkeypatch.setattr(backend, "has_metal", lambda: has_metal)
    facts, lines = doctor(capsys)
    assert facts["mlx_route"] == {"route": route, "reason": reason} and said in lines["mlx computes by"]
    if route == "plain":
        assert lines["mlx extension"] == "not in use: plain MLX does not take it"


@pytest.mark.long
def test_doctor_runs_the_metal_kernels_and_tells_what_went_wrong(capsys, monkeypatch, engine):
    mx = pytest.importorskip("mlx.core")
    from kvpool.cli import doctor as command

    factory = engine.factory(0)
    monkeypatch.setattr(mx, "stream", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(mx.fast, "metal_kernel", factory)
    assert command.metal_kernels_failure() is None
    monkeypatch.setattr(mx.fast, "metal_kernel", lambda **description: factory(**description | {"source": "error;"}))
    failure = command.metal_kernels_failure()
    assert failure and "error" in failure
    for kernels, said in ((None, "compiled and run"), (failure, "NO: ")):
        (_, text) = command.metal_rows({"available": True, "device": "some GPU", "kernels": kernels})[1]
        assert text.startswith(said)


def test_doctor_tells_of_metal_kernels_and_the_extension(capsys, monkeypatch):
    mx = pytest.importorskip("mlx.core")
    from kvpool_backends.mlx import native

    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    for active in (False, True):
        found = {"active": active, "built": active, "why": "" if active else "not built", "folder": "/there"}
        found["command"] = "make it"
        monkeypatch.setattr(native, "status", lambda found=found: found)
        lines = doctor(capsys)[1]
        costs = "not in use: not built; so each layer is an evaluation of its own; `make it` builds it"
        assert lines["mlx extension"] == ("in use, /there" if active else costs)
        assert lines["Metal kernels"] == "no: no Metal device; they run in the tests only"
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    facts, lines = doctor(capsys)
    assert facts["metal"]["reason"].endswith("no Metal device, it computes on a GPU of another kind")
    assert lines["mlx computes by"].startswith("plain MLX: MLX computes on")
