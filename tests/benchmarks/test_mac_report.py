"""``python -m benchmarks.mac_report``: each part says something, whatever the others do. Metal is the stand-in's."""

import base64
import json
import re
import zlib

import mlx.core as mx
import pytest

from benchmarks import beside_dense, metal, predict
from benchmarks import mac_report as report
from kvpool.cli import doctor


@pytest.fixture
def fake(monkeypatch, engine):
    """A Mac whose GPU is the stand-in, with parts as small as can be."""
    monkeypatch.setattr(metal, "metal_device", lambda: "Apple M4 Max")
    monkeypatch.setattr(doctor, "metal_facts", lambda: {"available": True, "device": "Apple M4 Max", "kernels": None})
    monkeypatch.setattr(mx.fast, "metal_kernel", engine.factory(0))
    monkeypatch.setattr(beside_dense, "RUNS", 3)
    monkeypatch.setattr(metal, "LAYERS_MAX", 1)
    monkeypatch.setattr(metal, "LAYERS_MIN", 1)
    monkeypatch.setattr(report, "LAUNCHES", 6)
    variants = ((64, 2, "float16", None), (62, 1, "float16", None), (64, 1, "float16", 8))
    monkeypatch.setattr(report, "VARIANTS", variants)
    monkeypatch.setattr(report, "DECODE", {"batches": (1,), "contexts": (40, 70), "groups": (2,), "num_q_heads": 2})
    monkeypatch.setattr(report, "PREFILL", ((64, 1, "float16"),))
    monkeypatch.setattr(report, "CHUNKS", (3, 40))
    monkeypatch.setattr(report, "PREFILL_CONTEXT", 64)
    small = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 320}
    monkeypatch.setattr(report, "LLAMA", report.LLAMA | small | {"num_attention_heads": 2, "num_key_value_heads": 1})
    monkeypatch.setattr(report, "POOLS", (512, 600))
    monkeypatch.setattr(metal, "sweep", lambda cases: {"PARTS_MAX": len(cases)})
    monkeypatch.setattr(report, "SECONDS", report.SECONDS | {"decode": 8.0, "writes": 0.2, "model": 5.0})


def parts_of(text=None):
    """The lines of each part of a report, by its title."""
    text = "".join(report.markdown()) if text is None else text
    parts = (part.partition("\n") for part in text.split("## ")[1:])
    return {title: body.split("```")[1].split("\n") for title, _, body in parts}


def test_the_report_has_a_part_for_everything_and_names_what_fails(fake):
    text = "".join(report.markdown())
    assert text.startswith("# kvpool on Apple M4 Max\n")
    parts = parts_of(text)
    assert "GPU(cores=40, bandwidth=546, clock=1.58, cache=48, nax=False)" in "".join(parts["Machine"])
    compiled = parts["Kernels compile"]
    assert [("FAILED: ValueError" in line, " kernels, limits unknown" in line) for line in compiled[2:] if line] == [
        (False, True),
        (True, False),
        (False, True),
    ]
    assert "6 launches, 0 wrong (seed 7)" in parts["6 launches against float64"]
    assert any("ms a step" in line for line in parts["Writes: scatter, extension"])
    decode = [line for line in parts["Decode, us of a layer"] if line.startswith("D ")]
    assert len(decode) == 2 * 2 + 2 + 2
    assert all("not measured" in line or len(re.findall(r" \d+", line)) >= 4 for line in decode)
    assert len([line for line in parts["Prefill, ms of a layer"] if line.startswith("D  64")]) == 2 * 2
    assert "FAILED" not in "".join(parts["Prefill, ms of a layer"] + decode)
    tokens = parts["Tokens per second of a model of 4 bits"]
    assert [line.partition(":")[0].partition(",")[0] for line in tokens if line] == ["mlx-lm", "on the pool", "Engine"]
    assert '{"PARTS_MAX": 2}' in parts["Constants that are fastest"]
    assert parts["Bits"][2:4] == ["division: 0 of 32 not rounded to nearest", "lanes of a matrix: as expected"]
    told = json.loads(zlib.decompress(base64.b64decode(text.rstrip().removesuffix("```").rpartition("```")[2])))
    assert told["facts"]["metal"]["device"] == "Apple M4 Max" and len(told["parts"]) == len(parts) - 1


def test_the_report_ends_within_ten_minutes(fake, monkeypatch):
    """Each part stops when its time is over, and says so; what is under way then has the rest of the ten minutes."""
    assert sum(report.SECONDS.values()) <= 480
    monkeypatch.setattr(mx.fast, "metal_kernel", None)  # nothing is launched
    monkeypatch.setattr(report, "bits", list)
    monkeypatch.setattr(report, "SECONDS", dict.fromkeys(report.SECONDS, 0.0))
    parts = parts_of()
    over = {title: sum("the time is over" in line for line in lines) for title, lines in parts.items()}
    assert over["Kernels compile"] == len(report.VARIANTS)
    assert over["Decode, us of a layer"] == 2 * 2 + 2 + 2
    assert over["Prefill, ms of a layer"] == 2 * 2
    assert "0 launches, 0 wrong (seed 7)" in parts["6 launches against float64"]
    assert any(line.endswith(" 1 steps") for line in parts["Writes: scatter, extension"])
    assert sum(":" in line for line in parts["Tokens per second of a model of 4 bits"]) == 3
    assert "FAILED" not in str(parts)


def test_wrong_kernels_are_in_the_report(fake, monkeypatch, engine):
    def wrong(**description):
        kernel = engine.factory(0)(**description)
        return lambda **call: [x * 1.1 for x in kernel(**call)]

    monkeypatch.setattr(mx.fast, "metal_kernel", wrong)
    found = parts_of()["6 launches against float64"]
    assert sum(line.startswith("FAILED") for line in found) == 6 and "6 launches, 6 wrong (seed 7)" in found


def test_a_machine_without_metal_says_so_in_every_part():
    if mx.metal.is_available():
        pytest.skip("there is Metal here")
    parts = parts_of()
    assert len(parts) == 9
    del parts["Machine"]
    assert all("not run: there is no Metal device here" in lines for lines in parts.values())


def test_limits_of_pipelines_are_those_of_each_kernel(monkeypatch):
    class Extension:
        metal_limits = staticmethod(lambda name: (1024 - len(name), 32, 8))

    monkeypatch.setattr("kvpool_backends.mlx.native.load", Extension)
    names = {"custom_kernel_kvpool_paged_reduce_0a", "custom_kernel_kvpool_paged_attention_0b"}
    assert report.limits(names) == "paged_attention_ 985/32/8, paged_reduce_0a 988/32/8"


PUBLISHED = (  # GPU, KV heads, query heads of each, head_dim, GB/s of MLX by tokens, whether heads share reads
    ("M5 Pro", 32, 1, 128, {8192: 282, 32_768: 281}, False),
    ("M5 Pro", 8, 4, 128, {8192: 263, 32_768: 264}, False),
    ("M5 Pro", 4, 8, 128, {8192: 184, 32_768: 190}, False),
    ("M5 Pro", 8, 8, 64, {8192: 113, 32_768: 119}, False),
    ("M5 Max", 4, 8, 128, {8192: 314, 16_384: 383, 32_768: 430}, False),
    ("M5 Max", 8, 8, 64, {8192: 228, 16_384: 258, 32_768: 275}, False),
    ("M5 Max", 4, 8, 128, {8192: 363, 16_384: 415, 32_768: 482}, True),
    ("M5 Max", 8, 8, 64, {8192: 273, 16_384: 307, 32_768: 360}, True),
)


def test_predictions_agree_with_what_others_published():
    """Each within a fourth, and all of them within 5 % on average; short calls cost more and are not here."""
    ratios = []
    for name, kv_heads, group, dim, rates, shares in PUBLISHED:
        for context, rate in rates.items():
            shape = predict.Shape(1, context, kv_heads, group, dim)
            ratios.append(predict.nbytes(shape) / predict.dense_seconds(predict.GPUS[name], shape, shares) / 1e9 / rate)
    assert all(0.8 < ratio < 1.25 for ratio in ratios), ratios
    assert abs(sum(ratios) / len(ratios) - 1) < 0.05


PUBLISHED_CHUNKS = (  # KV heads, group, head_dim, queries, context, us of MLX on an M5 Max: PR 3838 and 4476 of MLX
    (8, 4, 128, 12, 16_384, 1998),
    (8, 4, 128, 16, 32_768, 3832),
    (2, 8, 256, 512, 1536, 488),  # not fused
    (2, 8, 256, 1023, 1536, 1054),
)


def test_predicted_chunks_agree_with_what_others_published_and_only_mlx_has_tensor_operations():
    gpu = predict.GPUS["M5 Max"]
    for kv_heads, group, dim, queries, context, us in PUBLISHED_CHUNKS:
        _, dense = predict.both_seconds(gpu, predict.Shape(1, context, kv_heads, group, dim), queries)
        assert 0.7 < dense * 1e6 / us < 1.1
    for dim, mlx_gains, we_gain in ((128, True, True), (256, True, False), (80, False, False)):
        shape = predict.Shape(1, 16_384, 8, 4, dim)
        (ours, dense), (without, slower) = (predict.both_seconds(gpu._replace(nax=x), shape, 512) for x in (1, 0))
        assert (slower > 1.5 * dense, without > 1.5 * ours) == (mlx_gains, we_gain)


def test_spills_slow_what_instructions_bound():
    gpu, shape = predict.GPUS["M4 Max"], predict.Shape(1, 16_384, 8, 1, 64)
    spilling = [predict.both_seconds(gpu, shape, spilled=nbytes)[0] for nbytes in (0, 380, 1000)]
    assert sorted(set(spilling)) == spilling
    assert len(set(predict.table(0)) - set(predict.table(2000))) == 7  # all but two chunks, which MLX computes
