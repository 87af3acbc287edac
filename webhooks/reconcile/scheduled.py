"""Reconciling beside everything else: one round over all that the settings name."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import psycopg
import structlog
from psycopg_pool import PoolTimeout

from webhooks.consumer import Consumer
from webhooks.db import Ready
from webhooks.errors import ConfigurationError, WebhooksError
from webhooks.inbox import inbox
from webhooks.pool import Pool
from webhooks.provider_api import github_client, shortcut_client
from webhooks.reconcile import shortcut, turns
from webhooks.reconcile.app_auth import app_auth
from webhooks.reconcile.common import CLOCK, source_of
from webhooks.reconcile.github import compare
from webhooks.reconcile.github_log import KEPT_FOR, found
from webhooks.reconcile.redelivering import redeliver
from webhooks.reconcile.targets import Target, scheduled
from webhooks.settings import Settings
from webhooks.sources import GitHub, Shortcut, Source

log = structlog.get_logger(__name__)

OVERLAP = timedelta(minutes=15)
"""How much of what was whole is looked at again: clocks differ, and the newest things are passed over."""
FIRST_SHORTCUT = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to reconcile.

    Args:
        github: whose logs, each with our source.
        shortcut: our source; None: not Shortcut.
    """

    github: Sequence[tuple[Target, Source]]
    shortcut: Source | None


def plan(settings: Settings, consumer: Consumer) -> Plan:
    """Read from the settings what is to be reconciled.

    Raises:
        ConfigurationError: nothing is, or it cannot be read, or the consumer has no source for it.
    """
    logs, of_shortcut = scheduled(settings.reconcile_github), settings.reconcile_shortcut
    if not logs and of_shortcut in (None, "off"):
        raise ConfigurationError(
            "--reconcile-every: set WEBHOOKS_RECONCILE_GITHUB=OWNER/NAME:HOOK, or WEBHOOKS_RECONCILE_SHORTCUT=on"
        )
    with _naming("WEBHOOKS_RECONCILE_GITHUB", "=SOURCE after the hook"):
        github = [(one.target, source_of(consumer, GitHub, one.source)) for one in logs]
    if of_shortcut in (None, "off"):
        return Plan(github, None)
    with _naming("WEBHOOKS_RECONCILE_SHORTCUT", "its name instead of on"):
        return Plan(github, source_of(consumer, Shortcut, None if of_shortcut == "on" else of_shortcut))


@contextmanager
def _naming(variable: str, how: str) -> Generator[None]:
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(f"{variable}: {str(error).replace('--source', how)}") from None


async def round_of(
    pool: Pool, settings: Settings, plan: Plan, every: timedelta, on_moved: Callable[[Sequence[Ready]], None]
) -> None:
    """Reconcile everything whose turn is due. One that fails is logged, and keeps no other from its turn.

    Args:
        pool: the connections of this process.
        settings: the tokens and addresses, as they are now.
        plan: what to reconcile.
        every: how often each has a turn.
        on_moved: called with the deliveries that were accepted.
    """
    for target, source in plan.github:
        with _logged(str(target)):
            await _github(pool, settings, target, source, every)
    if plan.shortcut is not None:
        with _logged("Shortcut"):
            await _shortcut(pool, settings, plan.shortcut, every, on_moved)


@contextmanager
def _logged(what: str) -> Generator[None]:
    try:
        yield
    except (WebhooksError, psycopg.Error, PoolTimeout) as error:
        log.warning("could not reconcile", what=what, error=" ".join(str(error).split()))


async def _github(pool: Pool, settings: Settings, target: Target, source: Source, every: timedelta) -> None:
    scope = f"github:{source.name}:{target}"
    async with pool.transaction() as tx:
        turn = await turns.take(tx, scope, pool.process, every)
    if turn is None:
        return
    auth = app_auth(settings) if target.kind == "app" else None
    async with github_client(settings, auth=auth) as client:
        hook = await found(client, target, source.name, clock=CLOCK)
        since = KEPT_FOR if turn.whole_until is None else turn.whole_until - OVERLAP
        comparison = await compare(pool.transaction, client, hook, source, since)
        outcomes = await redeliver(pool.transaction, client, comparison, growing=True)
    for line in comparison.expired:
        log.error("missing, and too old to be delivered again", what=str(target), guid=line.guid, event=line.event)
    for line in comparison.left_alone:
        log.warning("not here, and not asked for", what=str(target), guid=line.guid, event=line.event, why=line.verdict)
    for guid, outcome in outcomes.items():
        if outcome.result == "arrived":
            log.info("was missing, and has arrived", what=str(target), guid=guid, delivery=outcome.delivery)
        else:
            log.warning("is missing", what=str(target), guid=guid, result=outcome.result, reason=outcome.reason)
    if all(outcome.result in ("arrived", "refused") for outcome in outcomes.values()):
        async with pool.transaction() as tx:
            await turns.whole(tx, scope, turn.began_at)


async def _shortcut(
    pool: Pool, settings: Settings, source: Source, every: timedelta, on_moved: Callable[[Sequence[Ready]], None]
) -> None:
    scope = f"shortcut:{source.name}"
    async with pool.transaction() as tx:
        turn = await turns.take(tx, scope, pool.process, every)
    if turn is None:
        return
    since = FIRST_SHORTCUT if turn.whole_until is None else turn.whole_until - OVERLAP
    async with shortcut_client(settings) as client:
        comparison = await shortcut.compare(pool.transaction, client, source, since)
    accepted = await shortcut.accept(pool.transaction, comparison)
    on_moved([Ready(inbox.table, "applying", id) for id in accepted.values()])
    for entry, id in accepted.items():
        log.info("was missing, and is accepted from the history", what="Shortcut", entry=entry, delivery=id)
    async with pool.transaction() as tx:
        await turns.whole(tx, scope, turn.began_at)
