"""Errors as text: short, and without the values of rows."""

from __future__ import annotations

import psycopg
import pytest
from gates import a_gate, opened, sql
from psycopg.errors import UniqueViolation

from webhooks.pool import Pool
from webhooks.text import LONGEST_ERROR, describe, less_and_less, message_of, traceback_of

TWICE = "INSERT INTO patch_sessions (sc_id, title, status) VALUES (2, %(title)s, 'received')"


async def refused(pool: Pool) -> UniqueViolation:
    """An error whose second line tells the secret that a row holds."""
    await sql(pool, "ALTER TABLE patch_sessions ADD UNIQUE (title)")
    await opened(pool, a_gate(), 1)
    with pytest.raises(UniqueViolation) as raised:
        await sql(pool, TWICE, title=f"story {1}")
    assert "story 1" in str(raised.value)
    return raised.value


def quoted(error: Exception) -> ValueError:
    """An error of somebody's own that quotes another."""
    with pytest.raises(ValueError, match="cannot open it") as raised:
        try:
            raise error
        except psycopg.Error as caught:
            raise ValueError(f"cannot open it ({caught}), sorry") from None
    return raised.value


async def test_what_a_row_holds_is_not_told_by_the_error_nor_by_one_that_quotes_it(pool: Pool) -> None:
    error = await refused(pool)
    told = 'duplicate key value violates unique constraint "patch_sessions_title_key"'
    assert describe(error) == f"UniqueViolation: {told}"
    quoting = quoted(error)
    assert describe(quoting) == f"ValueError: cannot open it ({told}), sorry"
    assert message_of(quoting) == f"cannot open it ({told}), sorry"
    assert describe(RuntimeError(str(error))) == f"RuntimeError: {told}"
    assert "story 1" not in describe(RuntimeError(repr(error)))
    group = ExceptionGroup("g", [error, ValueError("and\x00more")])
    assert describe(group) == f"UniqueViolation: {told}; ValueError: and\x00more"
    assert "story 1" not in traceback_of(group)
    assert "in refused" in traceback_of(error)


def test_the_constraint_and_the_hint_are_told(database_url: str) -> None:
    with psycopg.connect(database_url) as connection, pytest.raises(psycopg.Error) as raised:
        connection.execute("SELECT no_such_function(1)")
    assert "no_such_function" in describe(raised.value)
    assert "(hint: No function matches" in describe(raised.value)


def test_an_error_is_short_whatever_it_says() -> None:
    assert describe(ValueError("x" * 30_000_000)) == "ValueError: " + "x" * (LONGEST_ERROR - 13) + "…"
    assert len(describe(ExceptionGroup("g", [ValueError(str(number)) for number in range(10_000)]))) == LONGEST_ERROR
    assert len(message_of(ValueError("x" * 5_000))) == LONGEST_ERROR


def test_an_error_that_cannot_be_told_is_told_of_all_the_same() -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise KeyError("no")

    assert describe(Unspeakable()) == "Unspeakable: its message cannot be shown (KeyError)"


def test_a_text_can_be_written_as_less_and_less() -> None:
    assert less_and_less("a\x00é\ud83d" + "x" * 300) == [
        "a\x00é\ud83d" + "x" * 300,
        "a???" + "x" * 196,
        "what went wrong could not be kept",
    ]


def test_a_chain_that_bites_its_tail_is_walked_once() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert traceback_of(first).count("ValueError: first") == 1
