"""`namespace`: everything besides the tokens that decides the KV content, as one key for the prefix cache."""

from __future__ import annotations

from collections.abc import Iterable

from kvpool.spec import checked_int

__all__ = ["namespace"]

_FIELD, _MULTIMODAL = b"f", b"m"


def _frame(part: bytes) -> bytes:
    return len(part).to_bytes(8, "big") + part


def _value(name: str, value: object) -> bytes:
    """Type, length and value: joined without them, ("org_1", "2345") and ("org_12345", "") are the same string."""
    if isinstance(value, str):
        return b"s" + _frame(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes):
        return b"b" + _frame(value)
    raise TypeError(f"[namespace] {name} is a {type(value).__name__} ({value!r}), bytes or str is needed")


def _items(multimodal: Iterable[tuple[int, bytes]]) -> dict[int, bytes]:
    items: dict[int, bytes] = {}
    for item in multimodal:
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise TypeError(f"[namespace] a multimodal item is {item!r}, (position, digest) is needed")
        position, digest = checked_int("namespace", "a multimodal position", item[0], 0), item[1]
        if not isinstance(digest, bytes):
            raise TypeError(f"[namespace] a multimodal digest is a {type(digest).__name__}, bytes are needed")
        if position in items:
            raise ValueError(f"[namespace] two multimodal items have one position ({position})")
        items[position] = digest
    return items


def namespace(
    *,
    salt: bytes | str | None = None,
    lora: bytes | str | None = None,
    model: bytes | str | None = None,
    multimodal: Iterable[tuple[int, bytes]] = (),
    **extra: bytes | str | None,
) -> bytes:
    """Return the key of everything besides the tokens that decides what a KV block holds.

    Sequences share blocks only if their namespaces are equal bytes. Different arguments give different bytes:
    the result is not a hash but the arguments themselves, each with its kind, name, type and length.

    Parameters
    ----------
    salt : bytes or str, optional
        Secret of a tenant. Without it, a client can neither hit these blocks nor learn by timing whether they
        are cached.
    lora : bytes or str, optional
        Identity of the adapter. Use a digest of its weights, because a name may later get other weights.
    model : bytes or str, optional
        Identity of the weights and of the KV format, where one pool serves several.
    multimodal : iterable of (int, bytes)
        For each image or sound: the position of its first placeholder token, and a digest (SHA-256, say) of
        its content with shape and dtype. In any order, one item per position.
    **extra : bytes or str, optional
        Whatever else changes the content, by name. None means not set; an empty value is a value.

    Returns
    -------
    bytes
        b"" if nothing is set. The same in every process. Its length is linear in that of the arguments.

    Raises
    ------
    TypeError
        A value is neither bytes nor str, a position is not an int, or a digest is not bytes.
    ValueError
        A position is negative or comes twice.

    Examples
    --------
    >>> namespace()
    b''
    >>> namespace(salt="a") == namespace(lora="a")
    False
    """
    fields = {"salt": salt, "lora": lora, "model": model, **extra}
    named = sorted((name.encode("utf-8", "surrogatepass"), name) for name in fields if fields[name] is not None)
    parts = [_FIELD + _frame(key) + _value(name, fields[name]) for key, name in named]
    for position, digest in sorted(_items(multimodal).items()):
        parts.append(_MULTIMODAL + _frame(position.to_bytes(8, "big")) + _value("digest", digest))
    return b"".join(parts)
