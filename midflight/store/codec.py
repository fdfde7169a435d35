"""Python values to SQLite columns and back, exactly.

Invariant: `decode(encode(x)) == x` for every id, log-prob and text a trajectory can hold, lone surrogates included.
Arrays are little-endian (int32, float64, one byte a flag) under zlib; an empty array is an empty blob.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np


class ValueNotStorable(ValueError):
    """A value has no JSON form; the message names the field."""


def encode_ids(ids: Sequence[int]) -> bytes:
    """Token ids as a compressed int32 blob.

    Raises:
        OverflowError: an id does not fit 32 bits.
    """
    return _pack(np.array(ids, dtype="<i4"))


def decode_ids(blob: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(_unpack(blob), dtype="<i4").tolist())


def encode_id_sets(sets: Sequence[Sequence[int]]) -> bytes:
    """Lists of ids, one after the other, each behind its length."""
    return encode_ids([number for one in sets for number in (len(one), *one)])


def decode_id_sets(blob: bytes) -> tuple[tuple[int, ...], ...]:
    numbers = decode_ids(blob)
    sets, at = [], 0
    while at < len(numbers):
        if not 0 <= numbers[at] < len(numbers) - at:
            raise ValueError(f"a list of {numbers[at]} ids where {len(numbers) - at - 1} follow")
        sets.append(numbers[at + 1 : at + 1 + numbers[at]])
        at += 1 + numbers[at]
    return tuple(sets)


def encode_floats(values: Sequence[float]) -> bytes:
    """Log-probs as a compressed float64 blob, bit for bit."""
    return _pack(np.array(values, dtype="<f8"))


def decode_floats(blob: bytes) -> tuple[float, ...]:
    return tuple(np.frombuffer(_unpack(blob), dtype="<f8").tolist())


def encode_flags(flags: Sequence[bool]) -> bytes:
    """Booleans as a compressed blob, one byte each."""
    return _pack(np.array(flags, dtype="?"))


def decode_flags(blob: bytes) -> tuple[bool, ...]:
    return tuple(np.frombuffer(_unpack(blob), dtype="?").tolist())


def encode_text(text: str) -> str | bytes:
    """Text as SQLite takes it: a blob where it holds lone surrogates, which UTF-8 refuses and tools do return."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
    return text


def decode_text(value: str | bytes) -> str:
    return value.decode("utf-8", "surrogatepass") if isinstance(value, bytes) else value


def encode_json(value: Any, field: str) -> str:
    """Compact JSON.

    Raises:
        ValueNotStorable: `value` has no JSON form; the message names `field`.
    """
    try:
        return json.dumps(value, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise ValueNotStorable(f"{field} {value!r:.80}: {error}; use JSON values only") from error


def decode_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"{text:.80} is no JSON object")
    return value


def grammar_hash(grammar: str) -> str:
    """Key of a grammar's text in the table of grammars."""
    return hashlib.sha256(grammar.encode("utf-8", "surrogatepass")).hexdigest()


def _pack(array: np.ndarray[Any, Any]) -> bytes:
    return zlib.compress(array.tobytes(), 6) if array.size else b""


def _unpack(blob: bytes) -> bytes:
    return zlib.decompress(blob) if blob else b""
