"""`webhooks reconcile github` and `webhooks reconcile shortcut`."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar

import click
from rich.console import Console

from webhooks.cli.app import app_of_context, app_option, examples, run
from webhooks.cli.asking import read_since
from webhooks.cli.reconciled import github_json, print_github, print_shortcut, shortcut_json
from webhooks.db import transaction
from webhooks.errors import ConfigurationError, UnknownName
from webhooks.loading import load_consumer
from webhooks.migrate import require_current
from webhooks.provider_api import github_client, shortcut_client
from webhooks.reconcile import github as with_github
from webhooks.reconcile import shortcut as with_shortcut
from webhooks.reconcile.app_auth import app_auth
from webhooks.reconcile.common import CLOCK, Begin, Tell, source_of
from webhooks.reconcile.github_log import found
from webhooks.reconcile.redelivering import Outcome, redeliver
from webhooks.reconcile.targets import Target, organization, repository
from webhooks.serve.database import connected
from webhooks.settings import Settings, duration
from webhooks.sources import GitHub, Shortcut, Source

T = TypeVar("T")

SOMETHING_IS_MISSING = 3
"""The exit code: 1 says that it could not be found out."""


def _read_span(ctx: click.Context, param: click.Parameter, value: str) -> timedelta:
    try:
        return duration(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


@click.group()
@app_option
def reconcile(app: str) -> None:
    """Find what a provider knows of and the inbox does not have, and fetch it.

    Without --redeliver or --accept nothing is changed. The exit code is 0 when everything is here, 3 when something is
    missing, and 1 when that could not be found out.
    """


@reconcile.command(
    epilog=examples(
        "webhooks reconcile github --repo acme/app --since 6h",
        "webhooks reconcile github --repo acme/app --hook 12345 --since 6h --redeliver",
        "webhooks reconcile github --org acme --hook 678 --redeliver --json",
        "webhooks reconcile --app shop:consumer github --app --redeliver",
    )
)
@click.option("--repo", metavar="OWNER/NAME", help="A repository's hook.")
@click.option("--org", metavar="ORG", help="An organization's hook.")
@click.option("--app", "as_app", is_flag=True, help="The hook of the GitHub App in WEBHOOKS_GITHUB_APP_ID.")
@click.option("--hook", type=click.IntRange(1, 2**63 - 1), help="Its id; without it, the only one for a receiver.")
@click.option("--since", default="1d", show_default=True, callback=read_since, help="Tried since: 6h, 3d, or a time.")
@click.option("--source", help="The source of ours, where there are several of GitHub.")
@click.option("--redeliver", "ask", is_flag=True, help="Have GitHub deliver again what is missing, and wait for it.")
@click.option("--wait", default="2m", show_default=True, callback=_read_span, help="For the last one to arrive.")
@click.option(
    "--kept-for", default="3d", show_default=True, callback=_read_span, help="By GitHub; your own server: 7d."
)
@click.option("--all", "everything", is_flag=True, help="Show what is here as well.")
@click.option("--json", "as_text", is_flag=True, help="As JSON, for programs; with everything.")
def github(
    repo: str | None,
    org: str | None,
    as_app: bool,
    hook: int | None,
    since: datetime | timedelta,
    source: str | None,
    ask: bool,
    wait: timedelta,
    kept_for: timedelta,
    everything: bool,
    as_text: bool,
) -> None:
    """Compare GitHub's delivery log with the inbox, and have what is missing delivered again.

    The inbox decides: a delivery that is here is left alone whatever GitHub says of it, and one that is not is missing
    even where GitHub counts it as delivered. An interrupted run is gone on with by running it again; several at once do
    not ask for anything twice. (The consumer's --app goes before the word github.)
    """
    target = _target(repo, org, as_app=as_app, hook=hook)
    settings = Settings.load()
    ours = _source(GitHub, source)

    async def work(begin: Begin, tell: Tell) -> tuple[with_github.Comparison, dict[str, Outcome]]:
        auth = app_auth(settings) if target.kind == "app" else None
        async with github_client(settings, auth=auth) as client:
            meant = await found(client, target, ours.name, clock=CLOCK)
            comparison = await with_github.compare(begin, client, meant, ours, since, kept_for=kept_for, tell=tell)
            if not ask or not comparison.wanted:
                return comparison, {}
            return comparison, await redeliver(begin, client, comparison, wait=wait, tell=tell)

    comparison, outcomes = _worked(settings, work, "run the same command again, it goes on where it was")
    if as_text:
        click.echo(json.dumps(github_json(comparison, outcomes), indent=2))
    else:
        print_github(comparison, outcomes, everything=everything, asked=ask)
    arrived = sum(outcome.result == "arrived" for outcome in outcomes.values())
    if comparison.expired or comparison.left_alone or arrived < len(comparison.wanted):
        raise click.exceptions.Exit(SOMETHING_IS_MISSING)


@reconcile.command(
    epilog=examples(
        "webhooks reconcile shortcut --since 6h",
        "webhooks reconcile shortcut --since 2026-01-31T12:00 --story 123 --accept",
    )
)
@click.option("--since", default="1d", show_default=True, callback=read_since, help="Since when: 6h, 3d, or a time.")
@click.option("--story", "stories", type=click.IntRange(1, 2**63 - 1), multiple=True, help="Look at this one as well.")
@click.option("--source", help="The source of ours, where there are several of Shortcut.")
@click.option("--accept", "take", is_flag=True, help="Put what is missing into the inbox.")
@click.option("--all", "everything", is_flag=True, help="Show what is here as well.")
@click.option("--json", "as_text", is_flag=True, help="As JSON, for programs; with everything.")
def shortcut(
    since: datetime | timedelta,
    stories: tuple[int, ...],
    source: str | None,
    take: bool,
    everything: bool,
    as_text: bool,
) -> None:
    """Compare the history of stories with the inbox, and accept what is missing.

    Looked at are the stories that deliveries since then tell of, those that Shortcut says were updated, and those
    named. What is accepted carries no signature: it comes from Shortcut's API, with your token. Its origin is
    reconcile.
    """
    settings = Settings.load()
    ours = _source(Shortcut, source)

    async def work(begin: Begin, tell: Tell) -> tuple[with_shortcut.Comparison, dict[str, int]]:
        async with shortcut_client(settings) as client:
            comparison = await with_shortcut.compare(begin, client, ours, since, stories=stories, tell=tell)
        return comparison, await with_shortcut.accept(begin, comparison, tell=tell) if take else {}

    comparison, accepted = _worked(settings, work, "run the same command again: what was accepted stays")
    if as_text:
        click.echo(json.dumps(shortcut_json(comparison, accepted), indent=2))
    else:
        print_shortcut(comparison, accepted, everything=everything, took=take)
    if comparison.missing and not take:
        raise click.exceptions.Exit(SOMETHING_IS_MISSING)


def _source(kind: type[Source], name: str | None) -> Source:
    consumer = load_consumer(app_of_context())
    try:
        return source_of(consumer, kind, name)
    except ConfigurationError as error:
        if name is None:
            raise
        raise UnknownName(str(error)) from None  # as in a filter of any other command


def _target(repo: str | None, org: str | None, *, as_app: bool, hook: int | None) -> Target:
    if sum((repo is not None, org is not None, as_app)) != 1:
        raise click.UsageError("say whose hook: --repo OWNER/NAME, --org ORG or --app")
    if as_app and hook is not None:
        raise click.UsageError("--hook goes with --repo and --org: an app has one hook")
    try:
        if repo is not None:
            return repository(repo, hook)
        return Target("app") if org is None else organization(org, hook)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _worked(settings: Settings, work: Callable[[Begin, Tell], Coroutine[Any, Any, T]], how_to_go_on: str) -> T:
    """Run the asynchronous part, with a line of progress on a terminal."""

    async def all_of_it() -> T:
        async with _database(settings) as begin:
            with _progress() as tell:
                return await work(begin, tell)

    try:
        return run(all_of_it())
    except KeyboardInterrupt:
        click.echo(f"stopped; {how_to_go_on}", err=True)
        raise


@asynccontextmanager
async def _database(settings: Settings) -> AsyncGenerator[Begin]:
    async with connected(settings) as connection:
        await require_current(connection, schema=settings.schema_name)
        yield partial(transaction, connection)


@contextmanager
def _progress() -> Generator[Tell]:
    shown = Console(stderr=True, highlight=False, markup=False)
    with shown.status("asking") as status:

        def tell(what: str, done: int, of: int | None) -> None:
            status.update(f"{what}: {done}" if of is None else f"{what}: {done} of {of}")

        yield tell
