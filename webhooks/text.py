"""Errors as text: short enough to be kept, and without the values of rows that PostgreSQL puts into them.

What PostgreSQL says of an error has a first line for everybody, and a `DETAIL` with values of the row (`Key
(email)=(…) already exists.`): those are for whoever may read the table, not for logs, reasons and notifications. See
https://www.postgresql.org/docs/current/error-style-guide.html
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from typing import cast

import psycopg

LONGEST_ERROR = 4_000
SHORT_ERROR = 200
NOT_KEPT = "what went wrong could not be kept"
# Errors that caused an error, and so on: a chain may be endless.
MOST_IN_A_CHAIN = 100

# As libpq writes it: the rest of such a text is values, or says where they came from.
_DETAIL = re.compile(r"(?:^|\n|\\n)DETAIL:  .*", re.DOTALL)


def describe(error: BaseException) -> str:
    """Return an error with its name, or the members of a group, as one text for a person, short enough to be kept."""
    return shortened("; ".join(dict.fromkeys(_named(member) for member in members(error))))


def message_of(error: BaseException) -> str:
    """Return what an error says, without its name; of a group, what `describe` does."""
    several = members(error)
    return describe(error) if several != [error] else shortened(_message(error))


def as_text(reason: object) -> str:
    """Return what was given as a reason as a text: an error is described."""
    if isinstance(reason, str):
        return reason
    return describe(reason) if isinstance(reason, BaseException) else str(reason)


def members(error: BaseException) -> list[BaseException]:
    """Return the errors of a group, and of the groups in it; of any other error the error itself."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    group = cast("BaseExceptionGroup[BaseException]", error)
    return [member for part in group.exceptions for member in members(part)]


def shortened(text: str, longest: int = LONGEST_ERROR) -> str:
    """Return a text, cut where it is longer than that many characters."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def less_and_less(text: str) -> list[str]:
    """Return a text, then what is written in its place where it is refused, in the end words that say nothing."""
    plain = "".join(letter if " " <= letter <= "~" else "?" for letter in text[:SHORT_ERROR])
    return [text, plain, NOT_KEPT]


def without_values(text: str) -> str:
    """Return a text that may quote PostgreSQL without what it says of a row's values."""
    return _DETAIL.sub("", text)


def traceback_of(error: BaseException) -> str:
    """Return an error's traceback, and those of its causes and members, with each error as it is described."""
    return "".join(_traceback(error, set())).rstrip()


def _traceback(error: BaseException, seen: set[int]) -> Iterator[str]:
    seen.add(id(error))
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None and id(cause) not in seen and len(seen) < MOST_IN_A_CHAIN:
        yield from _traceback(cause, seen)
        how = "was the direct cause of" if error.__cause__ is not None else "was being handled at the time of"
        yield f"\nThe error above {how} this one:\n\n"
    if error.__traceback__ is not None:
        yield "Traceback (most recent call last):\n"
        yield from traceback.format_tb(error.__traceback__)
    yield describe(error) + "\n"
    if isinstance(error, BaseExceptionGroup):
        for number, member in enumerate(cast("BaseExceptionGroup[BaseException]", error).exceptions, 1):
            if id(member) not in seen and len(seen) < MOST_IN_A_CHAIN:
                yield f"\nMember {number}:\n\n"
                yield from _traceback(member, seen)


def _named(error: BaseException) -> str:
    name, text = type(error).__name__, _message(error)
    return f"{name}: {text}" if text else name


def _message(error: BaseException) -> str:
    try:
        text = str(error)
        for cause in _chain(error):
            if isinstance(cause, psycopg.Error) and cause.diag.message_primary:
                # Whoever wrote another error's text may have quoted this one.
                hint = cause.diag.message_hint
                told = cause.diag.message_primary + (f" (hint: {hint})" if hint else "")
                text = text.replace(str(cause), told)
        return without_values(text).strip()
    except Exception as unspeakable:  # an error that cannot be told must not hide that there was one
        return f"its message cannot be shown ({type(unspeakable).__name__})"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Walk an error and whatever led to it, also where that is not to be shown in a traceback."""
    waiting, seen = [error], set[int]()
    while waiting and len(seen) < MOST_IN_A_CHAIN:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [cause for cause in (one.__cause__, one.__context__) if cause is not None]
