"""What a replay out of the inbox, or an export, would be about: counted, and the first few of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from webhooks.deliveries import Disposition
from webhooks.pool import Pool
from webhooks.selection import Found, Group, Reader, Scope, Selection, Unit, chosen, counted, first
from webhooks.sources import Source

SAMPLE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A selection, counted.

    Args:
        scope: what was counted; whoever does it uses this, so that it means the same deliveries.
        groups: how many, by source, event and disposition.
        sample: the first few.
        unreadable: how many bodies `where_json` could not look into; they are not among them.
        left_out: events that were split off and fit, where only whole requests can be repeated.
    """

    scope: Scope
    groups: tuple[Group, ...]
    sample: tuple[Found, ...]
    unreadable: int = 0
    left_out: int = 0

    @property
    def total(self) -> int:
        """How many deliveries there are."""
        return sum(group.count for group in self.groups)

    def as_json(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        return {
            "total": self.total,
            "unreadable": self.unreadable,
            "left_out": self.left_out,
            "groups": [
                {
                    "source": group.source,
                    "event": group.event,
                    "disposition": group.disposition,
                    "pruned": group.pruned,
                    "count": group.count,
                }
                for group in self.groups
            ],
            "sample": [
                {
                    "id": found.id,
                    "source": found.source,
                    "event": found.event,
                    "disposition": found.disposition,
                    "received_at": found.received_at.isoformat(),
                }
                for found in self.sample
            ],
        }


async def planned(
    pool: Pool,
    sources: Mapping[str, Source],
    wanted: Selection,
    unit: Unit,
    progress: Callable[[int], None] | None = None,
) -> Plan:
    """Count what a selection is about.

    Args:
        pool: the connections.
        sources: by name, who reads the bodies that `where_json` looks into.
        wanted: the filters.
        unit: what is selected.
        progress: told how many deliveries were looked at, while bodies are read.

    Raises:
        ConfigurationError: a filter names what is not there.
    """
    async with pool.transaction() as tx:
        scope = await chosen(tx, wanted, unit)
    if scope.where_json:
        return await _looked_through(pool, sources, scope, progress)
    async with pool.connection() as connection:
        groups = await counted(connection, scope)
        sample = await first(connection, scope, SAMPLE)
        parts = 0
        if unit == "request" and (wanted.disposition or wanted.row):
            parts = sum(group.count for group in await counted(connection, replace(scope, unit="part", limit=None)))
    return Plan(scope=scope, groups=tuple(groups), sample=tuple(sample), left_out=parts)


async def _looked_through(
    pool: Pool, sources: Mapping[str, Source], scope: Scope, progress: Callable[[int], None] | None
) -> Plan:
    counts: Counter[tuple[str, str | None, Disposition, bool]] = Counter()
    sample: list[Found] = []
    reader = Reader(pool, sources, scope)
    async for batch in reader.batches():
        counts.update((found.source, found.event, found.disposition, found.pruned) for found in batch)
        sample += [replace(found, headers=(), body=None) for found in batch[: SAMPLE - len(sample)]]
        if progress is not None:
            progress(reader.looked_at)
    groups = tuple(Group(*alike, count) for alike, count in counts.most_common())
    return Plan(scope=scope, groups=groups, sample=tuple(sample), unreadable=reader.unreadable)
