"""Types, names and signatures as a user's editor and interpreter show them."""

import ast
import inspect
import pydoc
import re
import rlcompleter
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from type_reports import MARK, planted, reported
from user_program import SPEC, by_hand, by_scheduler

import kvpool
from kvpool.adapters.block_manager import KVBlockManager
from kvpool.protocol import StepArrays
from kvpool_backends import load_backend
from kvpool_backends.cpu import BlockStore

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def sources(tmp_path):
    """A folder with copies of what the checkers read of the packages."""
    for package in ("kvpool", "kvpool_backends"):
        ignored = shutil.ignore_patterns("*.so", "*.pyx", "*.c", "__pycache__")
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored)
    return tmp_path


def test_program_runs():
    prompt = [5, 9, 23, 31, 7, 2]
    (alone,) = by_hand(prompt, num_samples=1)
    assert len(set(alone)) > 3
    assert by_hand(prompt) == [alone, alone]
    served = by_scheduler([prompt, [1, 2, 3]])
    assert served[0] == alone and served[1] != alone


@pytest.mark.long  # `make lint` runs both
@pytest.mark.parametrize("checker", MARK)
def test_checker_reports_each_mistake_and_nothing_else(checker, sources):
    assert len(planted(checker)) > 12
    assert reported(checker, sources) == planted(checker)


@pytest.mark.long
def test_wrong_types_of_the_package_are_seen_in_the_program(sources):
    init = sources / "kvpool" / "__init__.py"
    text = init.read_text()
    assert text.count("if not TYPE_CHECKING:") == 1
    init.write_text(text.replace("if not TYPE_CHECKING:", "if True:"))
    assert reported("pyright", sources) != planted("pyright")


# ------------------------------------------------------------------------------------------------- names


def completions(text):
    completer, found = rlcompleter.Completer({"kvpool": kvpool}), []
    while (match := completer.complete(text, len(found))) is not None:
        found.append(match.rstrip("()"))
    return found


def test_dir_is_what_the_package_offers():
    names = {name for name in dir(kvpool) if not name.startswith("__")}
    assert names == set(kvpool.__all__)
    assert all(getattr(kvpool, name) is not None for name in names)
    assert "__version__" in dir(kvpool)


def test_dir_is_the_same_before_and_after_the_late_names_are_loaded():
    code = """if True:
        import kvpool
        before = dir(kvpool)
        for name in before: getattr(kvpool, name)
        assert dir(kvpool) == before, set(dir(kvpool)) ^ set(before)
    """
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_completion_finds_late_names():
    assert completions("kvpool.S") == ["kvpool.Scheduler", "kvpool.StaleHandle", "kvpool.Step"]
    assert completions("kvpool.T") == completions("kvpool.e") == completions("kvpool.st") == []


def test_help_lists_every_class_and_function():
    text = pydoc.plain(pydoc.render_doc(kvpool))
    missing = [name for name in kvpool.__all__ if f"class {name}(" not in text and f"    {name}(" not in text]
    assert not missing


# --------------------------------------------------------------------------------------------------- repr


def test_backends_say_what_they_store():
    text = "of 8 blocks of 4 tokens, 2 layers of 4 x 16 in float32, {}, 32768 bytes"
    assert repr(load_backend("numpy")(SPEC, 8)) == f"<NumpyBackend {text.format('NHD')}>"
    assert re.fullmatch(rf"<CPUBackend {text.format('[HN]+D')}, \w+>", repr(load_backend("cpu")(SPEC, 8)))
    bits = replace(SPEC, k_bits=8, quant_group_size=32, head_dim=64)
    assert "in float32, keys 8 bits, groups of 32, NHD" in repr(load_backend("numpy")(bits, 8))


def test_managers_and_plans_say_what_they_hold():
    manager = KVBlockManager(SPEC, 8, backend="numpy")
    manager.step([manager.new_sequence().seq_id], 5)
    assert repr(manager) == f"<kvpool.adapters.block_manager.KVBlockManager: {manager.pool!r} on {manager.backend!r}>"
    assert "2 used by 1 sequences" in repr(manager)
    plan = StepArrays(seq_lens=np.array([5, 7]), slot_mapping=np.arange(3))
    assert repr(plan) == "<StepArrays of 2 rows and 3 tokens, 0 copies>"


# ------------------------------------------------------------------------------------------- constructors


def stub_signature(stub, cls):
    """What a stub says of a constructor: [(name, kind, default)]."""
    (found,) = [node for node in ast.parse((ROOT / stub).read_text()).body if getattr(node, "name", "") == cls]
    (new,) = [node for node in found.body if getattr(node, "name", "") == "__new__"]
    given = new.args.args[1:]
    defaults = [None] * (len(given) - len(new.args.defaults)) + new.args.defaults
    pairs = [(arg, "POSITIONAL_OR_KEYWORD", default) for arg, default in zip(given, defaults, strict=True)]
    pairs += [(arg, "KEYWORD_ONLY", default)
              for arg, default in zip(new.args.kwonlyargs, new.args.kw_defaults, strict=True)]  # fmt: skip
    empty = inspect.Parameter.empty
    return [(arg.arg, kind, empty if value is None else ast.literal_eval(value)) for arg, kind, value in pairs]


@pytest.mark.parametrize(
    ("cls", "stub"),
    [
        (kvpool.Pool, "kvpool/_core.pyi Pool"),
        (kvpool.Plan, "kvpool/_core.pyi Plan"),
        (BlockStore, "kvpool_backends/cpu/_kernels.pyi BlockStore"),
    ],
)
def test_signatures_of_constructors_are_those_of_the_stubs(cls, stub):
    file, name = stub.split()
    found = inspect.signature(cls).parameters.values()
    assert [(one.name, one.kind.name, one.default) for one in found] == stub_signature(file, name)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda pool: kvpool.Pool(), "Pool() missing 2 required positional arguments"),
        (lambda pool: kvpool.Pool(8, 4, 16), "Pool() takes 2 positional arguments but 3 were given"),
        (lambda pool: kvpool.Pool(8, 4, num_seqs=2), "Pool() got an unexpected keyword argument 'num_seqs'"),
        (lambda pool: kvpool.Pool(8, num_blocks=8), "Pool() got multiple values for argument 'num_blocks'"),
        (lambda pool: kvpool.Plan(pool), "Plan() missing 1 required positional argument: 'max_rows'"),
        (lambda pool: kvpool.Plan(pool, 1, 1, "csr"), "Plan() takes from 2 to 3 positional arguments but 4 were given"),
        (lambda pool: kvpool.Plan(pool, 1, format="csr"), "Plan() got an unexpected keyword argument 'format'"),
        (lambda pool: BlockStore(), "BlockStore() missing 3 required positional arguments"),
        (lambda pool: BlockStore(SPEC, 8, [], "avx2"), "BlockStore() takes 3 positional arguments but 4 were given"),
        (lambda pool: BlockStore(SPEC, 8, [], threads=2), "BlockStore() got an unexpected keyword argument 'threads'"),
    ],
)
def test_wrong_calls_of_constructors_name_the_class(call, text):
    with pytest.raises(TypeError, match=re.escape(text)):
        call(kvpool.Pool(8, 4))
