"""What `webhooks trigger` sends: made from samples, from a file, or from a delivery that is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from webhooks import deliveries
from webhooks.db import transaction
from webhooks.delivery import Headers
from webhooks.errors import ConfigurationError, Unreadable
from webhooks.inbox import pruned
from webhooks.migrate import require_current
from webhooks.samples import event_of, sample
from webhooks.samples.faults import with_characters
from webhooks.samples.request import Request, changed, encoded, is_form, signed
from webhooks.serve.database import connected
from webhooks.settings import Settings
from webhooks.source_secrets import secret_variable, secrets_found
from webhooks.sources import GitHub, Shortcut, Source
from webhooks.sources.reading import first, read_json


@dataclass(frozen=True, slots=True)
class Content:
    """One delivery, before it is signed.

    Args:
        event: what it tells of.
        body: its bytes.
        id: its id.
        kept: the header lines of the stored delivery that it repeats.
    """

    event: str
    body: bytes
    id: str
    kept: Headers | None = None

    def signed(self, source: Source, secret: str, now: float) -> Request:
        return signed(source, self.event, self.body, secret, self.id, kept=self.kept, now=now)


@dataclass(frozen=True, slots=True)
class Stored:
    """A delivery of the inbox."""

    id: int
    source: str
    event: str
    headers: Headers
    body: bytes

    def copied(self, source: Source) -> Content:
        """Return the same once more: what the receiver knows it by stays as it was."""
        named = "x-github-delivery" if isinstance(source, GitHub) else source.recipe.id_header
        return Content(self.event, self.body, (first(self.headers, named) or "") if named else "", self.headers)

    def anew(self, source: Source, changes: Sequence[str], id: str) -> Content:
        """Return it under another id. Its bytes change only where that, or a change that was asked for, is in them.

        Raises:
            ConfigurationError: that cannot be done to a body that cannot be read.
            ValueError: a change has no place in the body.
        """
        body = self.body
        if changes or isinstance(source, Shortcut):
            try:
                parsed = source.read(self.headers, self.body)
            except Unreadable as error:
                raise ConfigurationError(
                    f"delivery {self.id} cannot be changed: {error}; --same-id sends it as it is"
                ) from None
            body = changed(source, parsed, changes, id)
            if is_form(self.headers):
                body = encoded(body)
        return Content(self.event, body, id, self.headers)


async def stored(settings: Settings, id: int) -> Stored:
    """Read a delivery; of an event that was split off, the request that it came with.

    Raises:
        ConfigurationError: there is none, or nothing is left of it to be sent.
    """
    async with connected(settings) as connection:
        await require_current(connection, schema=settings.schema_name)
        async with transaction(connection) as tx:
            row = await deliveries.one(tx, id)
    if row is None:
        raise ConfigurationError(f"there is no delivery {id}")
    if told := pruned(row["parent"] or id, row["pruned_at"], row["headers_pruned_at"]):
        raise ConfigurationError(told)
    headers: Headers = tuple((name, value) for name, value in row["headers"])
    return Stored(id, row["source"], row["event"] or f"delivery {id}", headers, row["body"])


def from_samples(
    source: Source,
    names: Sequence[str],
    changes: Sequence[str],
    ids: Sequence[str],
    numbers: Mapping[str, int],
    *,
    characters: bool,
) -> list[Content]:
    """Make a delivery of each sample; with `characters`, some of its text takes several bytes a character.

    Raises:
        ConfigurationError: there is no such sample.
        ValueError: a change has no place in a body.
    """
    contents: list[Content] = []
    for name, id in zip(names, ids, strict=True):
        body = sample(source, name, numbers)
        if characters:
            with_characters(body)
        contents.append(Content(event_of(name), changed(source, body, changes, id, ascii=not characters), id))
    return contents


def from_file(source: Source, event: str, body: bytes, changes: Sequence[str], id: str, *, exact: bool) -> Content:
    """Make a delivery of a body of one's own; one that is no JSON is sent as it is.

    Raises:
        ConfigurationError: it is to be changed, and cannot be read.
        ValueError: a change has no place in it.
    """
    if exact:
        return Content(event, body, id)
    try:
        parsed = read_json(body)
    except Unreadable as error:
        if changes:
            raise ConfigurationError(f"--set cannot change the file: {error}") from None
        return Content(event, body, id)
    return Content(event, changed(source, parsed, changes, id), id)


def secret_of(source: str, settings: Settings) -> str:
    """Return the secret to sign with: the receiver's first one, or what `serve --dev` keeps here.

    Raises:
        ConfigurationError: there is none.
    """
    secrets = secrets_found(settings.home, source)
    if not secrets:
        raise ConfigurationError(
            f"no secret to sign with: set {secret_variable(source)} to the receiver's, or start it here with "
            "webhooks serve --dev"
        )
    return secrets[0]
