"""Text from outside on its way into a column: without what PostgreSQL refuses, and JSON that it can read."""

from __future__ import annotations

import json
from typing import Annotated, NoReturn, cast

import psycopg
from pydantic import BeforeValidator

LONGEST_ERROR = 4_000


def storable(text: str) -> str:
    """`text` with U+FFFD in place of NUL and of lone surrogates."""
    return text.replace("\0", "\ufffd").encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _storable_if_text(value: object) -> object:
    return storable(value) if isinstance(value, str) else value


def told(error: BaseException) -> str:
    """An error as a text that can be kept, without the values of rows that PostgreSQL says in a second line."""
    said = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    return storable(f"{type(error).__name__}: {said or error}".strip()[:LONGEST_ERROR])


Text = Annotated[str, BeforeValidator(_storable_if_text)]
"""A field of a model for text that somebody else wrote."""


def json_text(raw: bytes) -> str:
    r"""`raw` as JSON text that also casts to ``jsonb``: strictly JSON, UTF-8, its strings storable.

    Raises:
        ValueError: it is not JSON (``NaN`` and numbers past all bounds included), not UTF-8, or nested past reading.
    """
    try:
        value = json.loads(raw.decode(), parse_constant=_refuse)
        return json.dumps(_cleaned(value), ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise ValueError("nested past reading") from None


def _cleaned(value: object) -> object:
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, list):
        return [_cleaned(part) for part in cast("list[object]", value)]
    if isinstance(value, dict):
        return {storable(name): _cleaned(part) for name, part in cast("dict[str, object]", value).items()}
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
