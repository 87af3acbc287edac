"""Reconciling with GitHub: what its delivery log has and our inbox has not, and having it delivered again.

Nothing is accepted from GitHub's API: it keeps a body parsed, not the bytes that were signed. So what is missing comes
through the front door, delivered again, signed as ever, and known by its old guid.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from webhooks.db import Transaction
from webhooks.inbox import Copy, find
from webhooks.provider_api import Clock, ProviderClient
from webhooks.reconcile.common import CLOCK, Begin, Tell, quiet
from webhooks.reconcile.comparing import Line, compared, usable
from webhooks.reconcile.github_log import KEPT_FOR, Attempt, Hook, pages
from webhooks.sources import Source

GUIDS_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a log holds, beside the inbox.

    Args:
        hook: whose log.
        source: whose deliveries of ours.
        since: how far back it was read.
        begins_at: when the log begins, where that is later than `since`: what was before it cannot be seen any more.
        lines: one a delivery of GitHub's, the oldest first.
    """

    hook: Hook
    source: Source
    since: datetime
    begins_at: datetime | None
    lines: Sequence[Line]

    @property
    def wanted(self) -> list[Line]:
        """What is to be delivered again."""
        return [line for line in self.lines if line.wanted]

    @property
    def expired(self) -> list[Line]:
        """What is not here and cannot be delivered again."""
        return [line for line in self.lines if line.verdict == "expired"]

    @property
    def left_alone(self) -> list[Line]:
        """What is not here and is not asked for, because nobody can say that it never was, or it has no usable guid."""
        return [line for line in self.lines if line.verdict in ("beyond", "unusable")]


async def compare(
    begin: Begin,
    client: ProviderClient,
    hook: Hook,
    source: Source,
    since: datetime | timedelta,
    *,
    kept_for: timedelta = KEPT_FOR,
    clock: Clock = CLOCK,
    tell: Tell = quiet,
) -> Comparison:
    """Read a hook's log back to `since`, and compare it with the inbox. Nothing is changed, here or there.

    Args:
        begin: opens a transaction.
        client: one of GitHub's.
        hook: whose log.
        source: whose deliveries of ours.
        since: a time, or how long ago.
        kept_for: how long GitHub can deliver something again.
        clock: the time and how to wait.
        tell: told of progress.

    Raises:
        ProviderError: GitHub refused or did not answer.
    """
    now = datetime.fromtimestamp(clock.now(), UTC)
    back_to = since if isinstance(since, datetime) else now - since
    attempts: list[Attempt] = []
    async with aclosing(pages(client, hook, clock=clock)) as log:
        async for page in log:
            attempts += page
            tell("reading GitHub's delivery log", len(attempts), None)
            # Wholly older: the order is that of the attempts' ids, which is nearly that of their times.
            if page and max(attempt.delivered_at for attempt in page) < back_to:
                break
        recent = dict.fromkeys(attempt.guid for attempt in attempts if attempt.delivered_at >= back_to)
        # Only now: what the log holds has been answered, so it is in the inbox by now if it ever was to be.
        here = await copies_here(begin, source, hook, [guid for guid in recent if usable(guid)])
        # Of what is not here the first attempt counts, and it may be older than `back_to`.
        begun = {attempt.guid for attempt in attempts if not attempt.redelivery}
        unbegun = {guid for guid in recent if guid not in here and usable(guid)} - begun
        nothing: list[Attempt] = []
        while unbegun and (page := await anext(log, nothing)):
            attempts += page
            tell("reading GitHub's delivery log", len(attempts), None)
            unbegun -= {attempt.guid for attempt in page if not attempt.redelivery}
    begins_at = min((attempt.delivered_at for attempt in attempts), default=now)
    lines = compared((attempt for attempt in attempts if attempt.guid in recent), here, now - kept_for)
    # Reading ends before `back_to` only where the log does.
    return Comparison(hook, source, back_to, begins_at if begins_at > back_to else None, lines)


async def copies_here(begin: Begin, source: Source, hook: Hook, guids: Sequence[str]) -> dict[str, Copy]:
    """Return which of these deliveries are in the inbox, however many they are."""
    found: dict[str, Copy] = {}
    for start in range(0, len(guids), GUIDS_AT_ONCE):
        async with begin() as tx:
            found |= await copies(tx, source, hook, guids[start : start + GUIDS_AT_ONCE])
    return found


async def copies(tx: Transaction, source: Source, hook: Hook, guids: Sequence[str]) -> dict[str, Copy]:
    """Return which of these deliveries are in the inbox, under the keys that the receiver gives them."""
    keys = {(source.name, key): guid for guid in guids for key in _keys(source, hook, guid)}
    return {keys[identity]: copy for identity, copy in (await find(tx, list(keys))).items()}


def _keys(source: Source, hook: Hook, guid: str) -> set[str]:
    """Return a delivery's dedup keys: with its hook, and as it was where a proxy dropped that header."""
    delivery = ("x-github-delivery", guid)
    number = () if hook.id is None else (("x-github-hook-id", str(hook.id)),)
    return {source.dedup_key((delivery, *number), b""), source.dedup_key((delivery,), b"")}
