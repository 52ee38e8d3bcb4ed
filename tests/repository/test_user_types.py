"""Types, names and signatures as a user's editor and interpreter show them."""

import ast
import inspect
import re
import rlcompleter
from pathlib import Path

import pytest
from user_program import SPEC, by_hand, by_scheduler

import kvpool
from kvpool_backends.cpu import BlockStore

ROOT = Path(__file__).resolve().parents[2]


def test_program_runs():
    prompt = [5, 9, 23, 31, 7, 2]
    (alone,) = by_hand(prompt, num_samples=1)
    assert len(set(alone)) > 3
    assert by_hand(prompt) == [alone, alone]
    served = by_scheduler([prompt, [1, 2, 3]])
    assert served[0] == alone and served[1] != alone


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


def test_completion_finds_late_names():
    assert completions("kvpool.S") == ["kvpool.Scheduler", "kvpool.StaleHandle", "kvpool.Step"]
    assert completions("kvpool.T") == completions("kvpool.e") == completions("kvpool.st") == []


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
        (lambda pool: kvpool.Pool(8, num_blocks=8), "Pool() got multiple values for argument 'num_blocks'"),
        (lambda pool: kvpool.Plan(pool), "Plan() missing 1 required positional argument: 'max_rows'"),
        (lambda pool: kvpool.Plan(pool, 1, 1, "csr"), "Plan() takes from 2 to 3 positional arguments but 4 were given"),
        (lambda pool: BlockStore(), "BlockStore() missing 3 required positional arguments"),
        (lambda pool: BlockStore(SPEC, 8, [], "avx2"), "BlockStore() takes 3 positional arguments but 4 were given"),
    ],
)
def test_wrong_calls_of_constructors_name_the_class(call, text):
    with pytest.raises(TypeError, match=re.escape(text)):
        call(kvpool.Pool(8, 4))
