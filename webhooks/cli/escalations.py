"""`webhooks escalations`, `webhooks retry` and `webhooks resolve`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import click
from pydantic import JsonValue

from webhooks import decision
from webhooks.cli.app import app_option, examples, printable
from webhooks.cli.asking import ask, time_of
from webhooks.cli.selecting import somebody
from webhooks.db import Transaction
from webhooks.decision import Told, as_value, told
from webhooks.escalation import Escalated, as_json, escalated, matching
from webhooks.loading import load_consumer
from webhooks.settings import Settings

F = TypeVar("F", bound=Callable[..., Any])

AT_ONCE = 100


def _by_option(function: F) -> F:
    return click.option("--by", default=somebody, show_default="$USER", help="Who decides.")(function)


@click.command(epilog=examples("webhooks escalations", "webhooks escalations --table deliveries --json"))
@app_option
@click.option("--table", "of", help="Only those of this table; dead deliveries are in the table deliveries.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, help="How many of a table.")
@click.option("--json", "as_text", is_flag=True, help="As JSON, for programs.")
def escalations(app: str, of: str | None, limit: int, as_text: bool) -> None:
    """List the rows that a person has to decide about, with what is known about each."""
    consumer = load_consumer(app)

    async def question(tx: Transaction) -> list[Escalated]:
        return await escalated(tx, consumer, of=of, limit=limit)

    packets = ask(Settings.load(), question)
    if as_text:
        click.echo(json.dumps(as_json(packets), indent=2))
        return
    for packet in packets:
        _print(packet)
    if not packets:
        click.echo("nothing waits for a person")


@click.command(
    epilog=examples(
        "webhooks retry patch_sessions:123 --reason 'the token was renewed'",
        "webhooks retry tickets:7 --reason 'looked it up' --effect 'charge=done:{\"id\": 5}'",
        "webhooks retry tickets:7 --reason 'looked it up' --effect charge=not-done",
        "webhooks retry orders:7 --reason 'approved by Ann' --value '{\"approved\": true}'",
        "webhooks retry --all --table patch_sessions --where claimed_from=drafted",
        "webhooks retry --all --reason 'GitHub is back' --yes",
    )
)
@click.argument("row", metavar="TABLE:KEY|DELIVERY", required=False)
@app_option
@click.option("--reason", help="Why; it is written down.")
@_by_option
@click.option("--effect", "effects", multiple=True, metavar="NAME=done:JSON|not-done", help="What became of a call.")
@click.option("--value", "said", metavar="JSON", help="What the phase is told: claim.decision.value.")
@click.option("--all", "everything", is_flag=True, help="Every escalated row; with --yes, else they are only listed.")
@click.option("--table", "of", help="With --all: only those of this table.")
@click.option("--where", "filters", multiple=True, metavar="COLUMN=VALUE", help="With --all: only those that have it.")
@click.option("--yes", is_flag=True, help="With --all: do it.")
def retry(
    row: str | None,
    app: str,
    reason: str | None,
    by: str,
    effects: tuple[str, ...],
    said: str | None,
    everything: bool,
    of: str | None,
    filters: tuple[str, ...],
    yes: bool,
) -> None:
    """Give an escalated row, or a dead delivery, a new set of attempts; apply a parked delivery now.

    What it has done already stays done. A call whose answer nobody knows is repeated only if you say what became of
    it: --effect NAME=not-done lets the next attempt call again, --effect NAME=done:JSON gives it the result.

    A phase that escalated because a person has to say something, an approval for instance, reads who decided, why and
    the --value; it counts for this stay of the row in the phase.
    """
    if (row is None) != everything:
        raise click.UsageError("name one row, or use --all")
    if (of or filters or yes) and not everything:
        raise click.UsageError("--table, --where and --yes go with --all")
    if effects and everything:
        raise click.UsageError("--effect goes with one row")
    if not reason and (yes or not everything):
        raise click.UsageError("say why: --reason '…'")
    value = None if said is None else _value(said)
    if row is None:
        _retry_all(app, reason or "", by, value, of, _pairs(filters), yes=yes)
    else:
        _retry(app, row, reason or "", by, value, _told(effects))


@click.command(epilog=examples("webhooks resolve patch_sessions:123 --to closed --reason 'done by hand'"))
@click.argument("row", metavar="TABLE:KEY|DELIVERY")
@app_option
@click.option("--to", required=True, metavar="STATUS", help="The status it gets.")
@click.option("--reason", required=True, help="Why; it is written down.")
@_by_option
@click.option("--force", is_flag=True, help="Take a status that neither the gate nor the table names.")
def resolve(row: str, app: str, to: str, reason: str, by: str, force: bool) -> None:
    """Close an escalated row by hand, or a parked delivery as ignored."""
    consumer = load_consumer(app)

    async def question(tx: Transaction) -> None:
        await decision.resolve(tx, consumer, row, to=to, decided_by=by, reason=reason, force=force)

    ask(Settings.load(), question)
    click.echo(printable(f"{row} is {to}"))


def _retry(app: str, row: str, reason: str, by: str, value: JsonValue, effects: dict[str, Told]) -> None:
    consumer = load_consumer(app)

    async def question(tx: Transaction) -> str:
        return await decision.retry(tx, consumer, row, decided_by=by, reason=reason, value=value, effects=effects)

    status = ask(Settings.load(), question)
    click.echo(printable(f"{row} waits in {status}"))


def _retry_all(
    app: str, reason: str, by: str, value: JsonValue, of: str | None, where: dict[str, str], *, yes: bool
) -> None:
    settings, consumer = Settings.load(), load_consumer(app)

    async def which(tx: Transaction) -> list[str]:
        return await matching(tx, consumer, where, of=of)

    names = ask(settings, which)
    if not yes:
        for name in names:
            click.echo(printable(name))
        click.echo(f"{len(names)} rows would be tried again" + ("; do it with --yes" if names else ""))
        return
    retried, refused = 0, False
    for start in range(0, len(names), AT_ONCE):

        async def some(tx: Transaction, start: int = start) -> tuple[list[str], dict[str, str]]:
            batch = names[start : start + AT_ONCE]
            return await decision.retry_each(tx, consumer, batch, decided_by=by, reason=reason, value=value)

        done, left = ask(settings, some)
        retried, refused = retried + len(done), refused or bool(left)
        for name, why in left.items():
            click.echo(printable(f"{name} cannot be tried again: {why}"), err=True)
    click.echo(f"{retried} rows are tried again")
    if refused:
        raise click.exceptions.Exit(1)


def _pairs(filters: tuple[str, ...]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in filters:
        column, equals, value = text.partition("=")
        if not equals or not column or column in pairs:
            raise click.UsageError(f"--where {text}: write COLUMN=VALUE, each column once")
        pairs[column] = value
    return pairs


def _value(text: str) -> JsonValue:
    try:
        return as_value(text)
    except ValueError as error:
        raise click.UsageError(f"--value {error}") from None


def _told(effects: tuple[str, ...]) -> dict[str, Told]:
    try:
        return dict(told(text) for text in effects)
    except ValueError as error:
        raise click.UsageError(f"--effect {error}") from None


def _print(packet: Escalated) -> None:
    since = f", since {time_of(packet.since)}" if packet.since is not None else ""
    where = packet.phase or "no phase"
    click.echo(printable(f"{packet.row}  {where}, {packet.attempt_count} of {packet.max_attempts} attempts{since}"))
    if packet.cannot:
        click.echo(_indented(f"cannot {packet.cannot}: {packet.refusal}"))
        click.echo(_indented("mend what refuses it, or the row; it is tried again within two minutes"))
    if packet.last_error:
        click.echo(_indented(f"last error: {packet.last_error}"))
    for attempt in packet.attempts:
        error = f": {attempt['error']}" if attempt["error"] else ""
        when = time_of(attempt["claimed_at"])
        click.echo(_indented(f"attempt {attempt['attempt']}, {when}, {attempt['outcome'] or 'open'}{error}"))
    for effect in packet.effects:
        known = effect["state"]
        if known == "intended":
            known = f"nobody knows whether it happened: --effect {effect['name']}=not-done, or =done:JSON"
        result = f", {effect['result'][:200]}" if effect["result"] is not None else ""
        click.echo(_indented(f"effect {effect['name']}: {known}{result}"))


def _indented(text: str) -> str:
    return "  " + printable(text).replace("\n", "\n    ")
