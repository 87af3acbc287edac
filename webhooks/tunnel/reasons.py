"""Why there was no answer, or what a refusal said, in words for a person. What others wrote stays as it is."""

from __future__ import annotations

import re

from webhooks.sending import Answer

_NUMBERED = re.compile(r"^\[(?:Errno|SSL)[^\]]*\] ")
_PLAIN = {
    "All connection attempts failed": "nothing listens there",
    "Server disconnected without sending a response.": "it ended the connection without an answer",
    "ConnectError": "there is no connection to it",
    "ConnectTimeout": "there was no connection to it in time",
    "ReadTimeout": "it said nothing in time",
    "ReadError": "the connection broke",
    "WriteError": "the connection broke",
}
"""What the libraries below us say of a connection, and for that which they leave empty, the error's name."""


def plain(reason: str) -> str:
    """Return a reason of the libraries below us as a person would say it; any other as it is."""
    return _PLAIN.get(reason) or _NUMBERED.sub("", reason)


def why(error: Exception) -> str:
    """Return why a request was not answered."""
    return plain(" ".join(str(error).split()) or type(error).__name__)


def said(answer: Answer) -> str:
    """Return what a receiver said, or why it said nothing, without the status."""
    cause = answer.cause or ""
    if answer.status is None:
        return plain(cause)
    bare = f"answered {answer.status}"
    return "" if cause == bare else cause.removeprefix(f"{bare}: ")


def fault(answer: Answer) -> str:
    """Return a refusal whole: the status, where there was one, and what was said."""
    return ": ".join(part for part in ("" if answer.status is None else str(answer.status), said(answer)) if part)
