"""`kvpool.namespace`: different arguments, different bytes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from kvpool.namespaces import namespace

TRICKY: tuple[Any, ...] = (
    *(None, "", b"", "a", b"a", "ab", b"ab", "b", "aa", "ba", "salt", "lora", b"salt", "s", b"s", b"f", b"m"),
    *("\0", b"\0", b"\0" * 8, "1", "12345", "2345", "org_1", "org_12345", "é", "é".encode(), "e\u0301", "\ud800"),
    *("None", b"None", "a\0b", "a,b", "=a", "fa", "t", "ta", (1).to_bytes(8, "big"), b"b" + bytes(7) + b"\1a"),
    namespace(salt="a"),
)
#: Images: none, one, elsewhere, another one, none of its digest, digests with one unlike bit, and two in each order.
ITEMS: tuple[Any, ...] = (
    *((), ((0, b""),), ((0, b"a"),), ((1, b"a"),), ((256, b"a"),), ((0, b"ab"),), ((1, b"b"),)),
    *(((0, bytes(31) + b"\0"),), ((0, bytes(31) + b"\1"),)),
    *(((0, b"a"), (1, b"b")), ((0, b"b"), (1, b"a")), ((0, b""), (1, b"ab")), ((0, b"ab"), (1, b""))),
)


def test_namespace_bytes_are_as_documented() -> None:
    want = (
        b"f" + bytes(7) + b"\x04" + b"lora" + b"b" + bytes(7) + b"\x00"
        b"f" + bytes(7) + b"\x04" + b"salt" + b"s" + bytes(7) + b"\x02" + "é".encode()
        + b"m" + bytes(7) + b"\x08" + bytes(7) + b"\x03" + b"b" + bytes(8)
        + b"m" + bytes(7) + b"\x08" + bytes(7) + b"\x05" + b"b" + bytes(7) + b"\x01" + b"x"
    )  # fmt: skip
    assert namespace(salt="é", lora=b"", multimodal=[(5, b"x"), (3, b"")]) == want
    assert namespace() == namespace(salt=None, multimodal=[], other=None) == b""


def test_namespace_every_pair_of_tricky_values_is_distinguished() -> None:
    """Values that are swapped, joined elsewhere, bytes for text, empty for unset; and images."""
    seen: dict[bytes, Any] = {}
    names = ("salt", "lora", "model", "sal")
    every = [
        (pair, (), pair_of)
        for pair in itertools.product(TRICKY, repeat=2)
        for pair_of in itertools.permutations(names, 2)
    ]
    few = itertools.product(TRICKY[:17], repeat=2)
    every += [(pair, items, ("salt", "model")) for pair in few for items in ITEMS]
    for values, items, pair_of in every:
        fields = {name: value for name, value in zip(pair_of, values, strict=True) if value is not None}
        what = items, tuple(sorted((name, type(value).__name__, value) for name, value in fields.items()))
        assert seen.setdefault(namespace(**fields, multimodal=items), what) == what


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
