"""`kvpool.namespace`: different arguments, different bytes."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from typing import Any

import pytest

from kvpool.namespaces import namespace

TRICKY: tuple[Any, ...] = (
    *(None, "", b"", "a", b"a", "ab", b"ab", "b", "aa", "ba", "salt", "lora", b"salt", "s", b"s", b"f", b"m"),
    *("\0", b"\0", b"\0" * 8, "1", "12345", "2345", "org_1", "org_12345", "é", "é".encode(), "e\u0301", "\ud800"),
    *(
        "None",
        b"None",
        "a\0b",
        "a,b",
        "=a",
        "fa",
        (1).to_bytes(8, "big"),
        b"b" + bytes(7) + b"\1a",
        namespace(salt="a"),
    ),
)


def meaning(fields: dict[str, Any]) -> tuple:
    """What a set of arguments says: unset fields do not count, bytes are not text."""
    named = ((name, type(value), value) for name, value in fields.items() if name != "multimodal")
    return frozenset(field for field in named if field[2] is not None), frozenset(fields.get("multimodal", ()))


def test_namespace_bytes_are_as_documented() -> None:
    want = (
        b"f" + bytes(7) + b"\x04" + b"lora" + b"b" + bytes(7) + b"\x00"
        b"f" + bytes(7) + b"\x04" + b"salt" + b"s" + bytes(7) + b"\x02" + "é".encode()
        + b"m" + bytes(7) + b"\x08" + bytes(7) + b"\x05" + b"b" + bytes(7) + b"\x01" + b"x"
    )  # fmt: skip
    assert namespace(salt="é", lora=b"", multimodal=[(5, b"x")]) == want
    assert namespace() == namespace(salt=None, multimodal=[], other=None) == b""


def test_namespace_order_of_arguments_does_not_count() -> None:
    items = [(3, b"x"), (1, b"y"), (300, b"z")]
    want = namespace(salt="s", lora="l", b="1", a="2", multimodal=items)
    for order in itertools.permutations(items):
        assert namespace(a="2", multimodal=order, lora="l", salt="s", b="1") == want


def test_namespace_published_vector_of_joined_fields_differs() -> None:
    assert namespace(salt="org_1", lora="2345") != namespace(salt="org_12345", lora="")
    assert namespace(salt="org_1", lora="2345") != namespace(salt="org_12345")


def test_namespace_every_pair_of_tricky_values_is_distinguished() -> None:
    seen: dict[bytes, tuple] = {}
    names = ("salt", "lora", "model", "other")
    for values in itertools.product(TRICKY, repeat=2):
        for pair in itertools.permutations(names, 2):
            fields = {name: value for name, value in zip(pair, values, strict=True) if value is not None}
            what = tuple(sorted((name, type(value).__name__, value) for name, value in fields.items()))
            assert seen.setdefault(namespace(**fields), what) == what


def random_fields(rng: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name in rng.sample(("salt", "lora", "model", "sal", "t"), rng.randrange(1, 4)):
        text = "".join(rng.choices("ab\0f", k=rng.randrange(4)))
        fields[name] = rng.choice((text, text.encode()))
    if rng.random() < 0.5:
        fields["multimodal"] = [(p, rng.choice((b"", b"a", b"ab"))) for p in rng.sample(range(4), rng.randrange(3))]
    return fields


def attacked(fields: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Nearly the same arguments: what a careless key would not tell apart."""
    fields = dict(fields)
    items = fields.pop("multimodal", [])
    names = [name for name in fields if fields[name] is not None]
    if not names:
        return {"salt": "a", "multimodal": items}
    one, other = rng.choice(names), rng.choice(["salt", "lora", "model", "sal", "t"])
    kind = rng.randrange(6)
    if kind == 0:  # swap two fields
        fields[one], fields[other] = fields.get(other), fields[one]
    elif kind == 1:  # move a character from the end of one field to the front of another
        value, to = fields[one], fields.get(other)
        if one != other and isinstance(to, type(value)):
            fields[one], fields[other] = value[:-1], value[-1:] + to
    elif kind == 2:  # bytes for text
        value = fields[one]
        fields[one] = value.encode() if isinstance(value, str) else value.decode()
    elif kind == 3:  # empty for unset
        fields[one] = None if not fields[one] else fields[one][:0]
    elif kind == 4 and items:  # move the image, or its digest
        (position, digest), *rest = items
        items = [(position + 4, digest), *rest] if rng.random() < 0.5 else [(position, digest + b"a"), *rest]
    elif kind == 5 and len(items) == 2:  # swap the images
        (p, x), (q, y) = items
        items = [(p, y), (q, x)]
    return {**fields, "multimodal": items}


def test_namespace_a_million_adversarial_pairs_do_not_collide() -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    pairs = 0
    while pairs < 1_000_000:
        near = [random_fields(rng)]
        for _ in range(399):  # attacks on attacks
            near.append(attacked(rng.choice(near), rng))
        meanings: dict[bytes, tuple] = {}
        for one in near:  # every pair at once: a key with two meanings is a collision
            assert meanings.setdefault(namespace(**one), meaning(one)) == meaning(one), (seed, one)
        assert len(set(meanings.values())) == len(meanings), (seed, near)  # and equal meanings have one key
        pairs += len(meanings) * (len(meanings) - 1) // 2  # pairs that differ


def test_namespace_does_not_depend_on_the_process() -> None:
    program = (
        "from kvpool.namespaces import namespace;"
        "print(namespace(salt='s', lora=b'l', zeta='z', alpha='a', multimodal={(7, b'x'), (2, b'y')}).hex())"
    )
    seen = set()
    for seed in ("0", "1", "12345"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        seen.add(
            subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True).stdout
        )
    assert len(seen) == 1 and seen.pop().strip()


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"salt": 1}, TypeError),
        ({"lora": bytearray(b"a")}, TypeError),
        ({"other": True}, TypeError),
        ({"multimodal": [(1, "digest")]}, TypeError),
        ({"multimodal": [(True, b"x")]}, TypeError),
        ({"multimodal": [(1.0, b"x")]}, TypeError),
        ({"multimodal": [b"x"]}, TypeError),
        ({"multimodal": [(-1, b"x")]}, ValueError),
        ({"multimodal": [(2**63, b"x")]}, ValueError),
        ({"multimodal": [(1, b"x"), (1, b"x")]}, ValueError),
    ],
)
def test_namespace_wrong_argument_is_refused(fields: dict[str, Any], error: type) -> None:
    with pytest.raises(error, match=r"^\[namespace\] "):
        namespace(**fields)
