"""What `webhooks trigger` was asked for, and the deliveries that come of it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click

from webhooks.cli.app import run
from webhooks.cli.made import Content, from_file, from_samples, secret_of, stored
from webhooks.errors import ConfigurationError, Unreadable
from webhooks.samples import numbers
from webhooks.samples.faults import Bad, Sending, sending
from webhooks.settings import Settings
from webhooks.sources import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to send, as it was asked for."""

    events: tuple[str, ...]
    changes: tuple[str, ...]
    times: int
    fresh: bool
    shuffle: bool
    seed: int | None
    file: Path | None
    exact: bool
    id: str | None
    delivery: int | None
    same_id: bool
    bad: Bad | None


def check(wanted: Wanted, source: str | None) -> None:
    """Refuse what does not go together.

    Raises:
        click.UsageError: with what does.
    """
    several = len(wanted.events) > 1
    again = wanted.delivery is not None
    refusals = (
        (wanted.exact and (wanted.file is None or bool(wanted.changes)), "--exact goes with --file, and without --set"),
        (not again and source is None, "name a source and an event; --list shows what there is"),
        (not again and not wanted.events, f"name an event: webhooks trigger --list {source} shows what there is"),
        (again and bool(wanted.events or wanted.file), "--from-delivery goes without an event and without --file"),
        (wanted.same_id and not again, "--same-id goes with --from-delivery"),
        (
            wanted.same_id and bool(wanted.changes or wanted.fresh or wanted.id),
            "--same-id goes without --set, --fresh and --id",
        ),
        (wanted.file is not None and several, "--file goes with one event"),
        (wanted.id is not None and (several or wanted.fresh), "--id goes with one event, and without --fresh"),
        (wanted.exact and wanted.fresh, "--exact sends no fresh id, so it goes without --fresh"),
        (wanted.seed is not None and not wanted.shuffle, "--seed goes with --shuffle"),
    )
    for wrong, message in refusals:
        if wrong:
            raise click.UsageError(message)


def source_named(sources: Mapping[str, Source], name: str | None) -> Source:
    found = sources.get(name or "")
    if found is None:
        raise ConfigurationError(f"there is no source {name!r}; there are: {', '.join(sources) or 'none'}")
    return found


def sendings(
    wanted: Wanted, sources: Mapping[str, Source], source: str | None, settings: Settings
) -> tuple[Source, list[Sending]]:
    """Make everything that is sent, in order: each event so many times, as copies or each anew."""
    sender, make = _maker(wanted, sources, source, settings)
    secret = secret_of(sender.name, settings)
    rounds, copies = (wanted.times, 1) if wanted.fresh else (1, wanted.times)
    try:
        contents = [content for _ in range(rounds) for content in make()]
    except ValueError as error:
        raise click.UsageError(f"--set: {error}") from None
    made: list[Sending] = []
    for content in contents:
        made += [sending(sender, content.event, secret, partial(content.signed, sender), wanted.bad)] * copies
    for one in {one.event: one for one in made}.values() if wanted.delivery is None else ():
        _warn_of_another_event(sender, one)
    return sender, made


def _maker(
    wanted: Wanted, sources: Mapping[str, Source], source: str | None, settings: Settings
) -> tuple[Source, Callable[[], list[Content]]]:
    """Return who is to have sent it, and what makes one round of it, with new ids."""

    def id() -> str:
        return wanted.id or str(uuid.uuid4())

    if wanted.delivery is not None:
        found = run(stored(settings, wanted.delivery))
        sender = source_named(sources, source or found.source)
        if wanted.same_id:
            return sender, lambda: [found.copied(sender)]
        return sender, lambda: [found.anew(sender, wanted.changes, id())]
    sender = source_named(sources, source)
    if wanted.file is not None:
        body, [event] = wanted.file.read_bytes(), wanted.events
        return sender, lambda: [from_file(sender, event, body, wanted.changes, id(), exact=wanted.exact)]
    ids = [id for _ in wanted.events]
    characters = wanted.bad == "chunked"
    return sender, lambda: from_samples(
        sender, wanted.events, wanted.changes, [make() for make in ids], numbers(), characters=characters
    )


def _warn_of_another_event(source: Source, sending: Sending) -> None:
    request = sending.request
    if source.answered(request.headers, request.body):
        return
    try:
        found = [one.name for one in source.events(request.headers, source.read(request.headers, request.body))]
    except Unreadable:
        return
    if sending.event not in found:
        click.echo(f"note: the body says {', '.join(found) or 'nothing'}, not {sending.event}", err=True)
