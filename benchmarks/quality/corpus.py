"""Text to learn from and to be asked about: the standard library's sources, as bytes, and what is planted in them.

A planted document is source code with definitions in its first quarter and uses of them in the rest. A definition is
one token, which names a key and its value; a use is a token that names the key alone, and after it the definition
is repeated. Only who remembers the definition can tell the value, and in most places it is far away.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

BYTES, KEYS, VALUES = 128, 8, 16
VOCAB_SIZE = BYTES + KEYS + KEYS * VALUES
"""Tokens: bytes of the code, then a use of each key, then a definition of each key with each value."""
HELD_OUT = 26
"""Of 256 files, so many are not trained on."""

Bytes = NDArray[np.uint8]
Tokens = NDArray[np.int32]
Marks = NDArray[np.bool_]


@dataclass(frozen=True)
class Corpus:
    """What is trained on, and what is asked about. Bytes below 128 each."""

    train: Bytes
    held_out: Bytes
    digest: str


def read(folder: Path | None = None, least: int = 3000) -> Corpus:
    """Read all Python sources of at least `least` bytes below a folder, the standard library by default.

    Tests of the library and installed packages are left out. What is held out is decided by a file's name, so that it
    is the same everywhere.
    """
    root = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if {"site-packages", "dist-packages", "test", "tests", "idlelib"} & set(name.parts):
            continue
        text = path.read_bytes().translate(None, bytes(range(128, 256)))
        if len(text) >= least:
            is_held_out = hashlib.sha256(name.as_posix().encode()).digest()[0] < HELD_OUT
            parts[is_held_out].append(text)
    train, held_out = (b"\n".join(found) for found in parts)
    digest = hashlib.sha256(train + b"\0" + held_out).hexdigest()[:16]
    return Corpus(np.frombuffer(train, np.uint8), np.frombuffer(held_out, np.uint8), digest)


def excerpt(rng: np.random.Generator, text: Bytes, length: int) -> Bytes:
    """Return so many bytes from a random place."""
    if length > len(text):
        raise ValueError(f"[corpus] {length} bytes wanted, there are {len(text)}")
    start = int(rng.integers(0, len(text) - length + 1))
    return text[start : start + length]


def planted(rng: np.random.Generator, text: Bytes, length: int, uses: int = 1, after: int = 0) -> tuple[Tokens, Marks]:
    """Return a document of `length` tokens and which of them are definitions to be recalled.

    Every key is defined in the first quarter of the code and used so many times, at random places at least `after`
    bytes of code behind it.
    """
    code = length - KEYS * (1 + 2 * uses)
    quarter = code // 4
    if quarter < 1 or quarter + after > code:
        raise ValueError(f"[corpus] {uses} uses of {KEYS} keys, {after} bytes behind, do not fit in {length} tokens")
    definitions = BYTES + KEYS + VALUES * np.arange(KEYS) + rng.integers(0, VALUES, KEYS)
    order = rng.permutation(KEYS)
    asked = rng.permutation(np.repeat(np.arange(KEYS), uses))
    places = np.concatenate([rng.integers(0, quarter, KEYS), rng.integers(quarter + after, code + 1, len(asked))])
    places.sort()
    inserted = [definitions[order, None], np.stack([BYTES + asked, definitions[asked]], axis=1)]
    at = np.concatenate([places[:KEYS], np.repeat(places[KEYS:], 2)])
    body = excerpt(rng, text, code).astype(np.int32)
    document = np.insert(body, at, np.concatenate([part.ravel() for part in inserted]))
    marks = np.insert(np.zeros(code, bool), at, [False] * KEYS + [False, True] * len(asked))
    return document.astype(np.int32), marks


def batch(rng: np.random.Generator, text: Bytes, size: int, length: int, uses: int = 1) -> tuple[Tokens, Marks]:
    """Return planted documents ``[size, length]`` and their marks."""
    found = [planted(rng, text, length, uses) for _ in range(size)]
    return np.stack([document for document, _ in found]), np.stack([marks for _, marks in found])
