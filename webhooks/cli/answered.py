"""What came back to `webhooks trigger`, for a person, and whether it is what should have come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import click
from rich.table import Table

from webhooks.cli.app import console
from webhooks.cli.posting import Answer
from webhooks.cli.saying import in_line, say
from webhooks.source_secrets import secret_variable
from webhooks.sources import Source

MOST_LINES = 20


def print_answers(answers: Sequence[Answer], *, several: bool) -> None:
    """Print a line an answer, equal ones once; or, where these are many, how many there were of each kind."""
    lines = Counter((answer.sending.event if several else "", answer.status, answer.said) for answer in answers)
    if len(lines) <= MOST_LINES:
        for (event, status, said), count in lines.items():
            line = "  ".join(part for part in (event, f"{status or '---'} {said}") if part)
            say(line + (f"  ({count:,} times)" if count > 1 else ""))
        return
    table = Table("event", "status", "answer", "count", box=None, pad_edge=False)
    table.columns[3].justify = "right"
    kinds = Counter((answer.sending.event, answer.status, answer.word) for answer in answers)
    for (event, status, word), count in sorted(kinds.items(), key=lambda kind: (-kind[1], str(kind[0]))):
        table.add_row(in_line(event), str(status or "---"), in_line(word), f"{count:,}")
    console().print(table)


def fail_if_unexpected(answers: Sequence[Answer], where: str, source: Source) -> None:
    """Raise where a good delivery was refused, or a bad one was not.

    Raises:
        click.ClickException: the command failed.
    """
    wrong = [answer for answer in answers if not answer.sending.expected(answer.status)]
    if not wrong:
        return
    many = f"{len(wrong)} of {len(answers)} " if len(answers) > 1 else ""
    if right := wrong[0].sending.refused:
        would = " or ".join(map(str, sorted(right)))
        raise click.ClickException(f"{many}not refused by {where}, though sent wrong: {would} would be right")
    hint = _hint(wrong[0], source)
    raise click.ClickException(f"{many}refused by {where}" + (f": {hint}" if hint else ""))


def _hint(answer: Answer, source: Source) -> str | None:
    """Return what a person may do about a refusal, as far as its cause is known."""
    match answer.word:
        case "bad_signature":
            variable = secret_variable(source.name)
            return f"it has another secret: run this in the receiver's directory, or with its {variable}"
        case "unknown_source":
            return f"the consumer there has no source {source.name}"
        case _:
            return "is that the address of a receiver? --url names another one" if answer.status == 404 else None
