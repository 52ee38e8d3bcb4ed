"""`python -m benchmarks.models`: bytes of all model files beside mlx-lm's own caches, and the table in the docs."""

import gc
import re
from pathlib import Path

import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache
from mlx_models import computing_on_cpu

from benchmarks import models
from kvpool.adapters.mlx_lm import install
from kvpool.adapters.mlx_lm.hooks import Hook
from kvpool.adapters.mlx_lm.shapes import leaves_of
from kvpool.adapters.mlx_lm.states import arrays_in

PAGE = Path(__file__).resolve().parents[2] / "docs" / "mlx-lm.md"
SAMPLE = ("gemma3_text", "gpt_oss", "recurrent_gemma", "llama4", "step3p5", "qwen3_5", "baichuan_m1", "mamba", "llama")

cpu = pytest.fixture(computing_on_cpu, autouse=True)


# ------------------------------------------------------------------------------------------------------ bytes


def bytes_of(caches):
    """Bytes of keys, values and states that mlx-lm's caches hold, without the numbers of a batch."""
    arrays = []
    for cache in leaves_of(caches):
        if hasattr(cache, "keys"):
            arrays += [cache.keys, cache.values]
        else:
            arrays += arrays_in(cache.cache if isinstance(cache, ArraysCache) else [cache])
    return sum(array.nbytes for array in arrays)


def ran(model, make, num_rows, num_tokens):
    """The caches of a batch after a run of the model."""
    caches = make() if num_rows == 1 else models.merged(make, num_rows)
    for new in models.pieces(num_tokens):
        mx.eval(model(mx.ones((num_rows, new), mx.int32), cache=caches))
    return caches


def really_held(model, num_rows, num_tokens):
    stock = bytes_of(ran(model, lambda: Hook.stock_caches(model), num_rows, num_tokens))
    with install(model, 1 + (num_rows + 1) * (num_tokens // 16 + 2)) as kv:
        caches = ran(model, kv.make_cache, num_rows, num_tokens)
        gc.collect()
        found = kv.summary()
        del caches
    return models.Beside(stock, found.kv_nbytes + found.state_nbytes)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("name", ["gemma3_text", "gemma4_text", "qwen3_5", "falcon_h1", "plamo2"])
def test_bytes_of_filled_caches_are_those_of_a_run(name, num_rows):
    model = models.tiny(name, windows=False)
    assert models.held(model, num_rows, 300) == really_held(model, num_rows, 300)


def test_bytes_of_every_file_are_at_most_those_of_mlx_lm():
    gate = models.bytes_gate(models.FILES)
    print(gate)
    assert gate.holds


# --------------------------------------------------------------------------------------------------- capacity


def test_one_budget_holds_seven_times_the_sequences_of_gemma_4_31b():
    gate = models.capacity_gate()
    print(gate)
    assert gate.holds and gate.value < 8.4, "the limit"


# ------------------------------------------------------------------------------------------------ the command


def rows_of(text):
    """The cells of the first table, by file."""
    lines = [[cell.strip() for cell in line.strip("| \n").split("|")] for line in text.splitlines() if "|" in line]
    return {line[0]: line for line in lines[2:]}


def test_page_names_every_file_that_runs_where_the_command_finds_it():
    rows = re.findall(r"^\| ([\w +]+) \| ([\w.-]+(?:, [\w.-]+)*) \|$", PAGE.read_text(), re.MULTILINE)
    served = {name: how for how, names in rows for name in names.split(", ")}
    assert {*served, *models.NOT_RUN} == set(models.FILES)
    for line in models.measure(SAMPLE, 0, print):
        assert served[line.name] == line.route
