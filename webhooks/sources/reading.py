"""Reading what a sender wrote, whatever it wrote: pure helpers that sources share."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from typing import Any, TypeGuard

from webhooks.delivery import Headers
from webhooks.errors import Unreadable
from webhooks.nesting import TooDeep, loads

_LONGEST_KEY = 200


def read_json(body: bytes) -> Any:
    """Read a body as Python reads JSON: `NaN`, lone surrogates, repeated keys and a byte order mark included.

    Raises:
        Unreadable: with the reason for a person.
    """
    try:
        text = body.decode("utf-8-sig", "surrogatepass")
    except UnicodeDecodeError as error:
        raise Unreadable(f"not UTF-8: byte 0x{body[error.start]:02x} at position {error.start}") from None
    if not text:
        raise Unreadable("the body is empty")
    try:
        return loads(text)
    except TooDeep as error:
        raise Unreadable(f"nested past reading: {error}") from None
    except json.JSONDecodeError as error:
        raise Unreadable(f"not JSON: {error.msg} (line {error.lineno}, column {error.colno})") from None
    except ValueError:  # Python's guard against the quadratic time of reading a very long integer
        raise Unreadable("holds an integer too long to read") from None


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """Say whether a parsed value is a JSON object."""
    return isinstance(value, dict)


def is_array(value: object) -> TypeGuard[list[Any]]:
    """Say whether a parsed value is a JSON array."""
    return isinstance(value, list)


def mapping(value: object) -> dict[str, Any]:
    """Return a JSON object as it is, and an empty one for anything else."""
    return value if is_object(value) else {}


def sequence(value: object) -> list[Any]:
    """Return a JSON array as it is, and an empty one for anything else."""
    return value if is_array(value) else []


def objects(value: object) -> list[dict[str, Any]]:
    """Return the JSON objects of a JSON array, and none for anything else."""
    return [item for item in sequence(value) if is_object(item)]


def moment(value: object) -> datetime | None:
    """Read a time with its zone (ISO 8601, or whole unix seconds) as UTC; None for anything else."""
    try:
        if isinstance(value, str):
            read = datetime.fromisoformat(value)
            return None if read.tzinfo is None else read.astimezone(UTC)
        if isinstance(value, int) and not isinstance(value, bool):
            return datetime.fromtimestamp(value, UTC)
    except (ValueError, OverflowError, OSError):
        pass
    return None


def first(headers: Headers, name: str) -> str | None:
    """Return the first value of a header, None where it is missing or empty."""
    return next((value for given, value in headers if given == name and value), None)


def digest_key(content: bytes) -> str:
    """Make the dedup key of content that has no id of its own."""
    return "sha256:" + hashlib.sha256(content).hexdigest()


def fit_key(key: str) -> str:
    """Return a sender's id as it is where it can be stored, indexed and typed, else its digest.

    An id that looks like one of our digests is digested as well, so that no sender can choose another's key.
    """
    fit = 0 < len(key) <= _LONGEST_KEY and key.isascii() and key.isprintable() and key == key.strip()
    return key if fit and not key.startswith("sha256:") else digest_key(key.encode("utf-8", "surrogatepass"))
