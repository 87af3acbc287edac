"""Deliveries of the inbox as lines that can be kept, sent to somebody, and replayed from."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from webhooks.captures import written
from webhooks.errors import Unreadable
from webhooks.pool import Pool
from webhooks.replay.redaction import Redaction, Taken
from webhooks.selection import Found, Reader, Scope
from webhooks.sources import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What an export wrote.

    Args:
        lines: how many deliveries.
        redacted: in how many of them something was found and taken out.
        values: how many values of bodies that were.
        headers: how many header lines.
        left_out: by id, those that were not written, and why.
        after: everything up to this id was looked at.
    """

    lines: int
    redacted: int
    values: int
    headers: int
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
    lines = redacted = values = headers = 0
    left_out: dict[int, str] = {}
    reader = Reader(pool, sources, scope)
    async with aclosing(reader.batches(bodies=True)) as batches:
        async for batch in batches:
            for found in batch:
                source = sources.get(found.source)
                taken = _taken(found, source, redaction)
                if isinstance(taken, str):
                    left_out[found.id] = taken
                    continue
                changed = taken.headers != found.headers or taken.body != found.body
                await write(_line(found, source, taken, changed=changed) + b"\n")
                lines += 1
                redacted += changed
                values += taken.values
                headers += taken.lines
            if progress is not None:
                progress(reader.looked_at)
    return Export(lines=lines, redacted=redacted, values=values, headers=headers, left_out=left_out, after=reader.after)


def _taken(found: Found, source: Source | None, redaction: Redaction) -> Taken | str:
    """Return a delivery as it is written, or why it is not."""
    if found.body is None:
        return "its body was pruned"
    if not redaction:
        return Taken(found.headers, found.body)
    try:
        return redaction.applied(source, found.headers, found.body)
    except Unreadable as error:
        return f"its body cannot be read, and so nothing in it taken out: {error}"


def _line(found: Found, source: Source | None, taken: Taken, *, changed: bool) -> bytes:
    key: str | None = found.dedup_key
    if changed:
        # The key may be what was taken out.
        key = None if source is None else source.dedup_key(taken.headers, taken.body)
    facts = {
        "id": found.id,
        "source": found.source,
        "dedup_key": key,
        "event": found.event,
        "origin": found.origin,
        "received_at": found.received_at,
    }
    return written(facts, taken.headers, taken.body, redacted=changed)
