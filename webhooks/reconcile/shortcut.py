"""Reconciling with Shortcut: accepting what the history of stories has and our inbox has not.

Shortcut has no delivery log and delivers nothing again. But a story's history has the bodies of its webhooks, so what
is missing is accepted from there. Such a body carries no signature: it is believed because it came from Shortcut's API,
over TLS, in answer to our token; its origin is `reconcile`, so that it can be told from what was received.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from webhooks.db import Transaction, compose
from webhooks.delivery import Delivery, Headers
from webhooks.errors import ProviderError, Unreadable
from webhooks.inbox import find, insert
from webhooks.provider_api import Clock, ProviderClient
from webhooks.reconcile.common import CLOCK, Begin, Tell, quiet
from webhooks.reconcile.shortcut_api import Entry, history, updated_since
from webhooks.sources import Source

PAGE = 200
AT_ONCE = 100
ON_ITS_WAY = timedelta(minutes=2)
"""How old an entry must be to count as missing: before that its webhook may still arrive."""
HEADERS: Headers = (("content-type", "application/json"),)

# Pages by the index on (received_at, id); bodies are large, so few at a time.
KNOWN = compose(
    "SELECT id, received_at, headers, body FROM {deliveries}\n"
    "WHERE source = %(source)s AND parent IS NULL AND body IS NOT NULL\n"
    "    AND (received_at, id) > (%(after)s::timestamptz, %(id)s::bigint)\n"
    "ORDER BY received_at, id LIMIT %(limit)s"
)

Verdict = Literal["here", "missing", "on its way"]


@dataclass(frozen=True, slots=True)
class Line:
    """One entry of a history.

    Args:
        story: whose history.
        entry: the entry.
        events: what it tells of, as handlers know it.
        verdict: how that compares with the inbox; `on its way` is too new to be missed.
        delivery: its id here, None where it is not.
        status: what became of it here.
    """

    story: int
    entry: Entry
    events: tuple[str, ...]
    verdict: Verdict
    delivery: int | None = None
    status: str | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What happened to stories, beside the inbox.

    Args:
        source: whose deliveries of ours.
        since: how far back it was looked.
        stories: which were looked at.
        gone: those among them that Shortcut does not have any more: what happened to them cannot be seen.
        lines: one an entry, the oldest first.
    """

    source: Source
    since: datetime
    stories: Sequence[int]
    gone: Sequence[int]
    lines: Sequence[Line]

    @property
    def missing(self) -> list[Line]:
        """What can be accepted."""
        return [line for line in self.lines if line.verdict == "missing"]


async def compare(
    begin: Begin,
    client: ProviderClient,
    source: Source,
    since: datetime | timedelta,
    *,
    stories: Iterable[int] = (),
    clock: Clock = CLOCK,
    tell: Tell = quiet,
) -> Comparison:
    """Read the histories of the stories concerned, and compare them with the inbox. Nothing is changed.

    Concerned are those that deliveries since then tell of, those that Shortcut says were updated, and those given.

    Args:
        begin: opens a transaction.
        client: one of Shortcut's.
        source: whose deliveries of ours.
        since: a time, or how long ago.
        stories: further ones.
        clock: the time and how to wait.
        tell: told of progress.

    Raises:
        ProviderError: Shortcut refused or did not answer.
    """
    now = datetime.fromtimestamp(clock.now(), UTC)
    back_to = since if isinstance(since, datetime) else now - since
    concerned = {*stories, *await _known(begin, source, back_to), *await updated_since(client, back_to, clock=clock)}
    gone: list[int] = []
    entries: dict[str, tuple[int, Entry]] = {}
    for done, story in enumerate(sorted(concerned)):
        tell("reading histories", done, len(concerned))
        try:
            past = await history(client, story, clock=clock)
        except ProviderError as error:
            if error.status != 404:
                raise
            gone.append(story)
            continue
        for entry in past:
            if entry.changed_at >= back_to:
                # A bulk edit is one event in the histories of many stories.
                entries.setdefault(entry.id, (story, entry))
    lines = await _compared(begin, source, entries.values(), now)
    return Comparison(source, back_to, sorted(concerned), gone, lines)


async def accept(begin: Begin, comparison: Comparison, *, tell: Tell = quiet) -> dict[str, int]:
    """Put what is missing into the inbox, and return the new deliveries' ids by the entries'.

    What has arrived meanwhile is left as it is, and not returned.
    """
    missing = comparison.missing
    accepted: dict[str, int] = {}
    for start in range(0, len(missing), AT_ONCE):
        arrivals = {_key(comparison.source, line.entry): line for line in missing[start : start + AT_ONCE]}
        deliveries = [
            Delivery(comparison.source.name, key, HEADERS, line.entry.body, origin="reconcile")
            for key, line in arrivals.items()
        ]
        async with begin() as tx:
            new = await insert(tx, deliveries)
        accepted |= {arrivals[key].entry.id: id for (_, key), id in new.items()}
        tell("accepting", len(accepted), len(missing))
    return accepted


async def _compared(begin: Begin, source: Source, entries: Iterable[tuple[int, Entry]], now: datetime) -> list[Line]:
    ordered = sorted(entries, key=lambda found: (found[1].changed_at, found[1].id))
    lines: list[Line] = []
    for start in range(0, len(ordered), AT_ONCE):
        some = ordered[start : start + AT_ONCE]
        async with begin() as tx:
            here = await find(tx, [(source.name, _key(source, entry)) for _, entry in some])
        for story, entry in some:
            copy = here.get((source.name, _key(source, entry)))
            verdict: Verdict = "missing" if entry.changed_at < now - ON_ITS_WAY else "on its way"
            events = tuple(event.name for event in source.events(HEADERS, entry.data))
            if copy is None:
                lines.append(Line(story, entry, events, verdict))
            else:
                lines.append(Line(story, entry, events, "here", copy.id, copy.status))
    return lines


def _key(source: Source, entry: Entry) -> str:
    """Return the key that the receiver would give it."""
    return source.dedup_key(HEADERS, entry.body)


async def _known(begin: Begin, source: Source, since: datetime) -> set[int]:
    """Return the stories that deliveries since then tell of."""
    stories: set[int] = set()
    after, id = since, 0
    while True:
        async with begin() as tx:
            rows = await _page(tx, source, after, id)
        for row in rows:
            stories |= _stories_of(source, row)
        if len(rows) < PAGE:
            return stories
        after, id = rows[-1]["received_at"], rows[-1]["id"]


async def _page(tx: Transaction, source: Source, after: datetime, id: int) -> list[dict[str, Any]]:
    params = {"source": source.name, "after": after, "id": id, "limit": PAGE}
    return await (await tx.execute(KNOWN, params)).fetchall()


def _stories_of(source: Source, row: dict[str, Any]) -> set[int]:
    headers: Headers = tuple((name, value) for name, value in row["headers"])
    try:
        events = source.events(headers, source.read(headers, bytes(row["body"])))
    except Unreadable:
        return set()
    return {story for event in events if isinstance(story := event.data.get("story_id"), int)}
