"""Reading a selection: counted in one statement, or batch by batch, with or without the bodies."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, cast

from webhooks.db import Connection, transaction
from webhooks.deliveries import Disposition
from webhooks.delivery import Headers
from webhooks.errors import Unreadable
from webhooks.pool import Pool
from webhooks.selection.choice import Scope
from webhooks.selection.statements import BATCH, BODIES, COUNT
from webhooks.sources import Source
from webhooks.sources.reading import read_json

AT_ONCE = 500
MOST_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Found:
    """One delivery of a selection.

    Args:
        id: its number.
        source: who sent it.
        event: what it says, where that is known yet.
        disposition: what became of it.
        received_at: when.
        origin: how it came here.
        dedup_key: its key.
        holder: the delivery that holds its headers and body: itself, or the one it was split from.
        size: how many bytes the body has.
        pruned: whether the body is gone.
        headers: its header lines, where bodies were asked for.
        body: its exact bytes, where they were asked for and are still there.
    """

    id: int
    source: str
    event: str | None
    disposition: Disposition
    received_at: datetime
    origin: str
    dedup_key: str
    holder: int
    size: int
    pruned: bool
    headers: Headers = ()
    body: bytes | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """How many deliveries of a selection are alike."""

    source: str
    event: str | None
    disposition: Disposition
    pruned: bool
    count: int


class Reader:
    """Reads a selection batch by batch.

    Args:
        pool: the connections.
        sources: by name, who reads the bodies that `where_json` looks into.
        scope: the selection.

    Attributes:
        after: the id up to which everything was looked at.
        looked_at: how many deliveries were, before `where_json` took some out.
        unreadable: how many bodies `where_json` could not look into.
    """

    def __init__(self, pool: Pool, sources: Mapping[str, Source], scope: Scope) -> None:
        self.after = scope.after
        self.looked_at = 0
        self.unreadable = 0
        self._pool = pool
        self._sources = sources
        self._scope = scope

    async def batches(self, *, bodies: bool = False, at_once: int = AT_ONCE) -> AsyncGenerator[list[Found]]:
        """Yield what was selected, in the order of the ids; with bodies at most eight megabytes, or one delivery.

        A batch may be empty. `after` is its last id while it is being worked on.
        """
        scope = self._scope
        left = scope.limit
        while left is None or left > 0:
            most = at_once if left is None or scope.where_json else min(at_once, left)
            async with self._pool.connection() as connection:
                batch = await _batch(connection, scope, self.after, most)
            for part in _parts(batch) if bodies or scope.where_json else (batch,):
                found = await self._with_bodies(part) if bodies or scope.where_json else part
                kept = [each for each in found if self._passes(each)][:left]
                if left is not None:
                    left -= len(kept)
                self.looked_at += len(part)
                if part:
                    self.after = kept[-1].id if left == 0 and kept else part[-1].id
                yield kept
                if left == 0:
                    return
            if len(batch) < most:
                return

    async def _with_bodies(self, part: list[Found]) -> list[Found]:
        ids = list({found.holder for found in part if not found.pruned})
        async with self._pool.connection() as connection, transaction(connection) as tx:
            cursor = await tx.connection.execute(BODIES, {"ids": ids}, binary=True)  # half the bytes on the way
            rows = {row["id"]: row for row in await cursor.fetchall()}
        return [_filled(found, rows.get(found.holder)) for found in part]

    def _passes(self, found: Found) -> bool:
        if not self._scope.where_json:
            return True
        if found.body is None:
            self.unreadable += 1
            return False
        source = self._sources.get(found.source)
        try:
            # A source that is gone from the consumer may still be looked through.
            body = read_json(found.body) if source is None else source.read(found.headers, found.body)
        except Unreadable:
            self.unreadable += 1
            return False
        return all(wanted.passes(body) for wanted in self._scope.where_json)


async def first(connection: Connection, scope: Scope, count: int) -> list[Found]:
    """Return the first few of a selection without `where_json`, and without bodies."""
    return await _batch(connection, scope, scope.after, count if scope.limit is None else min(count, scope.limit))


async def counted(connection: Connection, scope: Scope) -> list[Group]:
    """Count a selection by source, event and disposition, the most frequent first; without `where_json`."""
    params = {**scope.params, "after": scope.after, "upto": scope.upto, "limit": scope.limit}
    async with transaction(connection):
        # Planned for these very filters: a plan for any would have to leave the indexes of a status or a row aside.
        rows = await (await connection.execute(COUNT[scope.unit], params, prepare=False)).fetchall()
    return [Group(**row) for row in rows]


async def _batch(connection: Connection, scope: Scope, after: int, limit: int) -> list[Found]:
    params = {**scope.params, "after": after, "upto": scope.upto, "limit": limit}
    async with transaction(connection):
        rows = await (await connection.execute(BATCH[scope.unit], params, prepare=False)).fetchall()
    return [_found(row) for row in rows]


def _found(row: Mapping[str, Any]) -> Found:
    return Found(
        id=row["id"],
        source=row["source"],
        event=row["event"],
        disposition=cast("Disposition", row["disposition"]),
        received_at=row["received_at"],
        origin=row["origin"],
        dedup_key=row["dedup_key"],
        holder=row["parent"] or row["id"],
        size=row["size"],
        pruned=row["pruned"],
    )


def _filled(found: Found, row: Mapping[str, Any] | None) -> Found:
    if row is None or row["body"] is None:  # pruned, perhaps since we looked
        return replace(found, pruned=True)
    headers = tuple((str(name), str(value)) for name, value in row["headers"])
    return replace(found, headers=headers, body=bytes(row["body"]))


def _parts(batch: Sequence[Found]) -> Iterator[list[Found]]:
    """Cut a batch, so that a part has a few megabytes of bodies at most, or one; of an empty one the part is empty."""
    part: list[Found] = []
    holders: dict[int, int] = {}
    for found in batch:
        if part and sum({**holders, found.holder: found.size}.values()) > MOST_BYTES:
            yield part
            part, holders = [], {}
        part.append(found)
        holders[found.holder] = found.size
    yield part
