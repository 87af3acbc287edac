"""A delivery as its provider would send it: the id where the provider puts it, its headers, its signature."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from webhooks.delivery import Headers
from webhooks.samples import edit
from webhooks.signatures import sign
from webhooks.sources import GitHub, Shortcut, Source
from webhooks.sources.reading import first, is_object

HOOK_ID = "1"
FORM = "application/x-www-form-urlencoded"


@dataclass(frozen=True, slots=True)
class Request:
    """What is posted to `/webhooks/{source}`."""

    headers: Headers
    body: bytes


def changed(source: Source, body: Any, changes: Sequence[str], id: str, *, ascii: bool = True) -> bytes:
    """Write a body with a delivery's own id, where that is in the body, and with the changes of `--set`.

    Args:
        source: whose body it is.
        body: parsed; it is changed in place.
        changes: assignments, see `edit.change`.
        id: the delivery's.
        ascii: whether to write other characters as `\\u…`.

    Raises:
        ValueError: a change has no place in the body.
    """
    if isinstance(source, Shortcut) and is_object(body) and body.get("type") != "validation":
        body["id"] = id
    for assignment in changes:
        edit.change(body, assignment)
    return json.dumps(body, ensure_ascii=ascii).encode("utf-8", "surrogatepass")


def signed(
    source: Source,
    event: str,
    body: bytes,
    secret: str,
    id: str,
    *,
    kept: Headers | None = None,
    now: float | None = None,
) -> Request:
    """Add the headers with which the source's provider would send a body.

    Args:
        source: who is to have sent it.
        event: what it tells of; GitHub says so in a header.
        body: the bytes to send.
        secret: one of the source's.
        id: the delivery's.
        kept: the header lines of a delivery that is sent again, instead of those of a new one; its signature and its
            id are made anew.
        now: unix seconds, where it is not to be signed as of this moment.

    Raises:
        ConfigurationError: the secret cannot sign.
    """
    headers = _new(source, event, id) if kept is None else _again(source, kept, id)
    when = time.time() if now is None else now
    return Request((*headers, *sign(source.recipe, body, secret, now=when, id=id)), body)


def as_form(request: Request, source: Source, secret: str) -> Request:
    """Send a body as GitHub's form encoding does, signed over the form."""
    body = encoded(request.body)
    lines = [line for line in request.headers if line[0] != "content-type" and line[0] not in source.recipe.headers]
    return Request((("content-type", FORM), *lines, *sign(source.recipe, body, secret, now=time.time())), body)


def encoded(body: bytes) -> bytes:
    """Write JSON in GitHub's form encoding."""
    return urlencode({"payload": body}).encode()


def is_form(headers: Headers) -> bool:
    """Say whether a body is GitHub's form encoding."""
    return (first(headers, "content-type") or "").partition(";")[0].strip().lower() == FORM


def _new(source: Source, event: str, id: str) -> Headers:
    headers = (("content-type", "application/json"), ("user-agent", "webhooks trigger"))
    if not isinstance(source, GitHub):
        return headers
    named = ("x-github-event", event.partition(".")[0])
    return (*headers, named, ("x-github-delivery", id), ("x-github-hook-id", HOOK_ID))


def _again(source: Source, kept: Headers, id: str) -> Headers:
    left = tuple(line for line in kept if line[0] not in source.recipe.headers)
    if not isinstance(source, GitHub):
        return left
    return (*(line for line in left if line[0] != "x-github-delivery"), ("x-github-delivery", id))
