"""What `webhooks reconcile` prints."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from webhooks.cli.app import console, printable
from webhooks.cli.asking import time_of
from webhooks.reconcile import github, shortcut
from webhooks.reconcile.redelivering import Outcome

MOST_SHOWN = 200
COLOURS = {
    "here": "green",
    "missing": "red",
    "failed": "red",
    "expired": "magenta",
    "beyond": "yellow",
    "unusable": "yellow",
    "on its way": "cyan",
}
WORDS = {
    "missing": "missing here",
    "failed": "failed there",
    "beyond": "first tried before the log begins",
    "unusable": "guid not usable",
}


def print_github(comparison: github.Comparison, outcomes: dict[str, Outcome], *, everything: bool, asked: bool) -> None:
    """Show GitHub's log beside the inbox, and what became of what was asked for again."""
    lines = [line for line in comparison.lines if everything or line.verdict != "here"]
    table = Table("guid", "event", "last tried", "at GitHub", "here", box=None, pad_edge=False, header_style="bold")
    if outcomes:
        table.add_column("delivered again")
    for line in lines[:MOST_SHOWN]:
        outcome = outcomes.get(line.guid)
        told = [] if outcome is None else [_told(outcome)]
        verdict = _verdict(line.verdict, line.delivery, line.status)
        tried, there = _second(line.delivered_at), printable(", ".join(line.statuses))
        table.add_row(printable(line.guid), printable(line.event), tried, there, verdict, *told)
    if lines:
        console().print(table)
        click.echo()
    _print_rest(len(lines))
    counts: Counter[str] = Counter(line.verdict for line in comparison.lines)
    of = f"{len(comparison.lines)} deliveries of {comparison.hook.target} since {_second(comparison.since)}"
    click.echo(f"{of}: {_counted(counts)}")
    if comparison.begins_at is not None:
        begins = _second(comparison.begins_at)
        click.echo(f"GitHub's log begins at {begins}: anything it delivered before that cannot be seen any more")
    if comparison.expired:
        click.echo(f"{len(comparison.expired)} too old to be delivered again: look at GitHub for what they told of")
    if any(line.verdict == "beyond" for line in comparison.lines):
        click.echo("first tried before the log begins: they may have been here and pruned, so they are not asked for")
    if comparison.wanted and not asked:
        click.echo("have them delivered again with --redeliver")
    results = Counter(outcome.result for outcome in outcomes.values())
    if results:
        click.echo(", ".join(f"{count} {result}" for result, count in results.items()))
    if results["not arrived"]:
        click.echo("not arrived: is the hook's URL this receiver, and its secret the same? See webhooks rejections")


def print_shortcut(comparison: shortcut.Comparison, accepted: dict[str, int], *, everything: bool, took: bool) -> None:
    """Show the histories beside the inbox, and what was accepted."""
    lines = [line for line in comparison.lines if everything or line.verdict != "here"]
    table = Table("entry", "story", "events", "happened", "here", box=None, pad_edge=False, header_style="bold")
    table.columns[1].justify = "right"
    for line in lines[:MOST_SHOWN]:
        id = accepted.get(line.entry.id)
        verdict = _verdict(line.verdict, line.delivery, line.status)
        if id is not None:
            verdict = Text(f"accepted as {id}", "green")
        events = printable(", ".join(dict.fromkeys(line.events)) or "none")
        happened = _second(line.entry.changed_at)
        table.add_row(printable(line.entry.id), str(line.story), events, happened, verdict)
    if lines:
        console().print(table)
        click.echo()
    _print_rest(len(lines))
    counts: Counter[str] = Counter(line.verdict for line in comparison.lines)
    of = f"{len(comparison.lines)} entries of {len(comparison.stories)} stories since {_second(comparison.since)}"
    click.echo(f"{of}: {_counted(counts)}")
    if comparison.gone:
        listed = ", ".join(map(str, comparison.gone[:20])) + (", …" if len(comparison.gone) > 20 else "")
        click.echo(f"Shortcut does not have any more, or does not show: stories {listed}")
    if took:
        others = ", the others had arrived" if len(accepted) < counts["missing"] else ""
        click.echo(f"{len(accepted)} accepted{others}")
    elif counts["missing"]:
        click.echo("accept them with --accept")


def _second(moment: datetime) -> str:
    return time_of(moment).partition(".")[0]


def _counted(counts: Counter[str]) -> str:
    told = [f"{counts[verdict]} {WORDS.get(verdict, verdict)}" for verdict in COLOURS if counts[verdict]]
    return ", ".join(told) or "none"


def _print_rest(count: int) -> None:
    if count > MOST_SHOWN:
        click.echo(f"… {count - MOST_SHOWN} more: --json shows all")


def _verdict(verdict: str, delivery: int | None, status: str | None) -> Text:
    told = WORDS.get(verdict, verdict)
    return Text(told if delivery is None else f"{told}: {delivery}, {status}", COLOURS[verdict])


def _told(outcome: Outcome) -> Text:
    if outcome.result == "arrived":
        return Text(f"arrived as {outcome.delivery}" + ("" if outcome.asked else ", unasked"), "green")
    return Text(printable(f"{outcome.result}: {outcome.reason}"), "red")


def github_json(comparison: github.Comparison, outcomes: dict[str, Outcome]) -> dict[str, Any]:
    """Return the same as plain values."""
    return {
        "hook": comparison.hook.path,
        "source": comparison.source.name,
        "since": comparison.since.isoformat(),
        "log_begins_at": None if comparison.begins_at is None else comparison.begins_at.isoformat(),
        "deliveries": [
            {
                "guid": line.guid,
                "event": line.event,
                "last_tried_at": line.delivered_at.isoformat(),
                "attempts": list(line.statuses),
                "verdict": line.verdict,
                "delivery": line.delivery,
                "status": line.status,
                "redelivery": _outcome_json(outcomes.get(line.guid)),
            }
            for line in comparison.lines
        ],
    }


def _outcome_json(outcome: Outcome | None) -> dict[str, Any] | None:
    if outcome is None:
        return None
    told = {"result": outcome.result, "asked": outcome.asked}
    return {**told, "reason": outcome.reason, "delivery": outcome.delivery}


def shortcut_json(comparison: shortcut.Comparison, accepted: dict[str, int]) -> dict[str, Any]:
    """Return the same as plain values."""
    return {
        "source": comparison.source.name,
        "since": comparison.since.isoformat(),
        "stories": list(comparison.stories),
        "gone": list(comparison.gone),
        "entries": [
            {
                "id": line.entry.id,
                "story": line.story,
                "events": list(line.events),
                "changed_at": line.entry.changed_at.isoformat(),
                "verdict": line.verdict,
                "delivery": accepted.get(line.entry.id, line.delivery),
                "accepted": line.entry.id in accepted,
            }
            for line in comparison.lines
        ],
    }
