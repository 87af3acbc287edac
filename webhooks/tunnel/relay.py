"""Posting what comes through a tunnel to the local receiver, until it is taken."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

import httpx

from webhooks.delivery import Headers
from webhooks.errors import ConfigurationError
from webhooks.sending import Answer, resigned, send
from webhooks.sources import Source
from webhooks.tunnel.reasons import fault

FIRST_WAIT_S, LONGEST_WAIT_S = 0.25, 2.0
SLOW_S = 10.0

Sleep = Callable[[float], Awaitable[None]]
Tell = Callable[[str], None]
"""Tells a person something, in one line. What others wrote may be in it, as it is: whoever shows it sees to that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """A delivery on its way to the local receiver.

    Args:
        source: the name in its URL.
        headers: its header lines, in order.
        body: its exact bytes.
        id: its number where it was received first, if that is known.
        event: what it says, if that is known.
        received_at: when it was received first, if that is known.
    """

    source: str
    headers: Headers
    body: bytes
    id: int | None = None
    event: str | None = None
    received_at: datetime | None = None


def wait_s(failures: int, first_s: float = FIRST_WAIT_S, longest_s: float = LONGEST_WAIT_S) -> float:
    """Return how long to wait after so many failures in a row: doubled each time, and never in step with others."""
    return float(min(first_s * 2 ** min(failures - 1, 30), longest_s) * random.uniform(0.5, 1))


def taken(answer: Answer) -> bool:
    """Say whether the receiver has the delivery now."""
    return answer.status is not None and 200 <= answer.status < 300


def is_away(answer: Answer) -> bool:
    """Say whether the receiver is not there, or not ready, whatever is sent to it."""
    return answer.outcome == "unavailable" and answer.status in (None, 429, 503)


class Signer:
    """Signs deliveries anew, for a receiver that has other secrets than the one they were sent to.

    Args:
        sources: by name, whose recipes are followed.
        secret: returns a secret of the local receiver's by its source's name.
        now: unix seconds, for signed times.
    """

    def __init__(
        self, sources: Mapping[str, Source], secret: Callable[[str], str], now: Callable[[], float] = time.time
    ) -> None:
        self._sources = sources
        self._secret = secret
        self._now = now

    def headers(self, incoming: Incoming) -> Headers:
        """Return the header lines with a signature of the local secret.

        Raises:
            ConfigurationError: the source or its secret is not known here.
        """
        source = self._sources.get(incoming.source)
        if source is None:
            there = ", ".join(self._sources) or "none"
            raise ConfigurationError(
                f"--resign: there is no source {incoming.source!r} here to sign for; there are: {there}"
            )
        return resigned(source, incoming.headers, incoming.body, self._secret(incoming.source), self._now())


class Relay:
    """Posts deliveries to one receiver, each until it is taken or finally refused.

    Args:
        client: whose connections are used.
        base: the receiver's base address.
        retries: how often a refused delivery is posted again. A receiver that is away is waited for all the same.
        tell: called with what a person should know.
        signer: signs each delivery anew; None sends the signature that it came with.
        sleep: how to wait.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        base: str,
        *,
        retries: int,
        tell: Tell,
        signer: Signer | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.base = base
        self.signer = signer
        self._client = client
        self._retries = retries
        self._tell = tell
        self._sleep = sleep

    async def post(self, incoming: Incoming) -> Answer:
        """Post a delivery, and return the answer that took it, or the last one that refused it.

        Raises:
            ConfigurationError: it cannot be signed anew.
        """
        loop = asyncio.get_running_loop()
        refused = away = 0
        away_since = 0.0
        while True:
            # Signed for each try, since a signed time grows old while the receiver is away.
            headers = incoming.headers if self.signer is None else self.signer.headers(incoming)
            asked_at = loop.time()
            slow = loop.call_later(
                SLOW_S, self._tell, f"{self.base} has not answered for {SLOW_S:.0f} s: waiting for it"
            )
            try:
                answer = await send(self._client, self.base, incoming.source, headers, incoming.body)
            finally:
                slow.cancel()
            if is_away(answer):
                away += 1
                if away == 1:
                    away_since = asked_at
                    answered = "" if answer.status is None else "it answered "
                    self._tell(f"{self.base} is away, waiting for it: {answered}{fault(answer)}")
                asked_s = 0.0 if answer.retry_after is None else answer.retry_after.total_seconds()
                await self._sleep(max(wait_s(away), min(asked_s, LONGEST_WAIT_S)))
                continue
            if away:
                self._tell(f"{self.base} answers again, after {loop.time() - away_since:.0f} s")
                away = 0
            if taken(answer) or refused == self._retries:
                return answer
            refused += 1
            await self._sleep(wait_s(refused))
