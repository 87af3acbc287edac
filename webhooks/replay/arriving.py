"""Deliveries on their way in from a file, or out to a receiver: signed where they must be, judged where they can be."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime

from webhooks.captures import Capture
from webhooks.delivery import Delivery, Headers
from webhooks.errors import ConfigurationError, Refused
from webhooks.sending import resigned
from webhooks.source_secrets import secret_variable
from webhooks.sources import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One delivery that is to be stored or sent.

    Args:
        place: its id, or its place in the file.
        source: whose it is.
        headers: all its header lines.
        body: its exact bytes.
        received_at: when it was first received, where that is known.
        signed: whether we signed it.
        pruned: whether its body is gone, so that it cannot be sent.
        broken: why this place of a file cannot be read; None where it can. A replay ends there.
    """

    place: int
    source: str
    headers: Headers = ()
    body: bytes = b""
    received_at: datetime | None = None
    signed: bool = False
    pruned: bool = False
    broken: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """Who signs, and who judges.

    Args:
        sources: by name, those of this consumer.
        secrets: by source, its secrets here; the first that can sign does.
        resign: whether every delivery is signed anew, not only those without a signature.
        most_bytes: the largest body that is stored.
        now: unix seconds.
    """

    sources: Mapping[str, Source]
    secrets: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    resign: bool = False
    most_bytes: int = 26 * 1024 * 1024
    now: Callable[[], float] = time.time

    def signed(self, arrival: Arrival) -> Arrival:
        """Sign a delivery with the first secret of its source here, if it has no signature or that is asked for.

        Raises:
            ConfigurationError: there is no secret to sign with, or it cannot sign.
        """
        source = self.sources.get(arrival.source)
        if source is None:
            return arrival
        if not self.resign and any(name == source.recipe.header for name, _ in arrival.headers):
            return arrival
        for secret in self.secrets.get(source.name, ()):
            with suppress(ConfigurationError):  # a public key
                headers = resigned(source, arrival.headers, arrival.body, secret, self.now())
                return replace(arrival, headers=headers, signed=True)
        raise ConfigurationError(
            f"no secret to sign with for {source.name}: set {secret_variable(source.name)} to the receiver's, or "
            "run this where webhooks serve --dev keeps one"
        )

    def judged(self, arrival: Arrival) -> Delivery:
        """Verify a delivery as of the time at which it was received, and make of it what is stored.

        Where nothing says when that was, its own signed time is as old as it may be.

        Raises:
            Refused: with the cause.
        """
        source = self.sources.get(arrival.source)
        if source is None:
            raise Refused("unknown_source")
        if len(arrival.body) > self.most_bytes:
            raise Refused("body_too_large")
        as_of = arrival.received_at if not arrival.signed else None
        now = self.now() if as_of is None else as_of.timestamp()
        try:
            source.verify(arrival.headers, arrival.body, self.secrets.get(source.name, ()), now)
        except Refused as refused:
            # Its age is looked at last, once the signature was found to be right.
            if refused.cause != "stale_timestamp" or as_of is not None:
                raise
        key = source.dedup_key(arrival.headers, arrival.body)
        return Delivery(source.name, key, source.keep(arrival.headers), arrival.body, origin="replay")

    def is_test(self, arrival: Arrival) -> bool:
        """Say whether a verified delivery is a mere test of a URL, which is answered and not stored."""
        return self.sources[arrival.source].answered(arrival.headers, arrival.body)


async def arrivals(
    captures: AsyncIterable[Capture], desk: Desk, *, after: int = 0, limit: int | None = None
) -> AsyncGenerator[Arrival]:
    """Yield the deliveries of a file, signed where they carry no signature.

    Args:
        captures: what is in the file.
        desk: who signs.
        after: leave out what stands up to this place.
        limit: how many at most.
    """
    left = limit
    async for capture in captures:
        if left == 0:
            return
        if capture.place <= after:
            continue
        left = None if left is None else left - 1
        if capture.fault is not None:
            yield Arrival(place=capture.place, source="", broken=f"{capture.name}: {capture.fault}")
            continue
        yield desk.signed(
            Arrival(
                place=capture.place,
                source=capture.source,
                headers=capture.headers,
                body=capture.body,
                received_at=capture.received_at,
            )
        )
