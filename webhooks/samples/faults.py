"""Deliveries that are wrong on purpose, so that every way to refuse one, or to read one, can be seen."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from webhooks.errors import ConfigurationError
from webhooks.samples.request import Request, as_form
from webhooks.signatures import new_secret
from webhooks.sources import GitHub, Source
from webhooks.sources.reading import is_object

Bad = Literal["signature", "stale", "truncated", "form", "chunked"]
BAD: tuple[Bad, ...] = get_args(Bad)
Wire = Literal["whole", "truncated", "chunked"]
"""How a body goes out: at once; cut before its end; in chunks that cut characters."""

LATE_S = 3600
CUT_HERE = "cut inside 😊 and é"
_PIECES = re.compile(rb"[\x00-\x7f]{1,16384}|[\x80-\xff]")


@dataclass(frozen=True, slots=True)
class Sending:
    """A request, how it is sent, and whether it should be taken.

    Args:
        event: what it tells of, for a person.
        request: what is sent.
        wire: how.
        refused: the answers that show the receiver right to refuse it; empty where it should take it.
    """

    event: str
    request: Request
    wire: Wire = "whole"
    refused: frozenset[int] = frozenset()

    def expected(self, status: int | None) -> bool:
        """Say whether an answer is right, None for a connection that ended without one."""
        if self.refused:
            return status in self.refused or (status is None and self.wire == "truncated")
        return status is not None and 200 <= status < 300


def sending(source: Source, event: str, secret: str, make: Callable[[str, float], Request], bad: Bad | None) -> Sending:
    """Make a delivery, wrong in the way that was asked for.

    Args:
        source: who is to have sent it.
        event: what it tells of.
        secret: one of the source's.
        make: makes the request, given a secret and the time to sign.
        bad: what is to be wrong; None: nothing.

    Raises:
        ConfigurationError: the source's deliveries cannot be wrong in that way.
    """
    now = time.time()
    if bad == "signature":
        return Sending(event, make(new_secret(source.recipe), now), refused=frozenset({401}))
    if bad == "stale":
        tolerance = source.recipe.tolerance_s
        if not source.recipe.timed or tolerance is None:
            raise ConfigurationError(f"--bad stale: {source.name} signs no time, so nothing it sends can be too old")
        return Sending(event, make(secret, now - tolerance - LATE_S), refused=frozenset({401}))
    request = make(secret, now)
    if bad == "form":
        if not isinstance(source, GitHub):
            raise ConfigurationError(f"--bad form: only GitHub sends forms, {source.name} does not")
        return Sending(event, as_form(request, source, secret))
    if bad == "truncated":
        return Sending(event, request, "truncated", frozenset({400, 408}))
    return Sending(event, request, "chunked" if bad == "chunked" else "whole")


def with_characters(body: Any) -> None:
    """Put characters of several bytes into a sample, so that there is something to cut inside of."""
    if is_object(body):
        body["webhooks_trigger"] = CUT_HERE


def pieces(body: bytes) -> list[bytes]:
    """Cut a body at every byte of every character that has several."""
    return _PIECES.findall(body)
