"""Deliveries of the inbox as lines that can be kept, sent to somebody, and replayed from."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from webhooks.captures import written
from webhooks.delivery import Headers
from webhooks.errors import Unreadable
from webhooks.pool import Pool
from webhooks.replay.redaction import Redaction
from webhooks.selection import Found, Reader, Scope
from webhooks.sources import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What an export wrote.

    Args:
        lines: how many deliveries.
        redacted: in how many of them something was found and taken out.
        left_out: by id, those that were not written, and why.
        after: everything up to this id was looked at.
    """

    lines: int
    redacted: int
    left_out: Mapping[int, str]
    after: int


async def export(
    pool: Pool,
    sources: Mapping[str, Source],
    scope: Scope,
    redaction: Redaction,
    write: Callable[[bytes], Awaitable[None]],
    progress: Callable[[int], None] | None = None,
) -> Export:
    """Write a selection, one line a delivery.

    Args:
        pool: the connections.
        sources: by name, who reads the bodies that are looked into.
        scope: which; of the unit `original`.
        redaction: what is taken out. A delivery from which it cannot be is left out.
        write: takes one line, its end included.
        progress: told how many deliveries were looked at.
    """
    lines = redacted = 0
    left_out: dict[int, str] = {}
    reader = Reader(pool, sources, scope)
    async with aclosing(reader.batches(bodies=True)) as batches:
        async for batch in batches:
            for found in batch:
                line = _line(found, sources.get(found.source), redaction)
                if isinstance(line, str):
                    left_out[found.id] = line
                    continue
                await write(line[0] + b"\n")
                lines += 1
                redacted += line[1]
            if progress is not None:
                progress(reader.looked_at)
    return Export(lines=lines, redacted=redacted, left_out=left_out, after=reader.after)


def _line(found: Found, source: Source | None, redaction: Redaction) -> tuple[bytes, bool] | str:
    """Return a line and whether something was taken out of it, or why there is none."""
    if found.body is None:
        return "its body was pruned"
    headers: Headers = found.headers
    body = found.body
    key: str | None = found.dedup_key
    changed = False
    if redaction:
        try:
            headers, body = redaction.applied(source, headers, body)
        except Unreadable as error:
            return f"its body cannot be read, and so nothing in it taken out: {error}"
        changed = headers != found.headers or body != found.body
        if changed:
            # The key may be what was taken out.
            key = None if source is None else source.dedup_key(headers, body)
    facts = {
        "id": found.id,
        "source": found.source,
        "dedup_key": key,
        "event": found.event,
        "origin": found.origin,
        "received_at": found.received_at,
    }
    return written(facts, headers, body, redacted=changed), changed
