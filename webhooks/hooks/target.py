"""Where a hook is registered, as `--register` and `webhooks hooks` name it, and what a hook is."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from webhooks.consumer import Consumer
from webhooks.errors import ConfigurationError
from webhooks.sources import GitHub, Shortcut, Source

ProviderName = Literal["github", "shortcut"]

KINDS: dict[ProviderName, type[Source]] = {"github": GitHub, "shortcut": Shortcut}
FORM = "github:OWNER/REPO[,events=…] or shortcut"
_REPOSITORY = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,38})/[A-Za-z0-9._-]{1,100}")
_EVENT = re.compile(r"[a-z][a-z0-9_]*|\*")
# GitHub sends it to every hook, and takes no subscription for it.
_SENT_ANYWAY = frozenset({"ping"})
EVERYTHING = ("*",)


@dataclass(frozen=True, slots=True)
class Target:
    """A place that hooks are registered at.

    Args:
        provider: whose API makes them.
        repository: GitHub's `OWNER/REPO`; None for Shortcut, whose hooks belong to the token's workspace.
        events: GitHub's events as they were named, none where they were not. Shortcut always sends everything.
    """

    provider: ProviderName
    repository: str | None = None
    events: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.provider if self.repository is None else f"{self.provider}:{self.repository}"


@dataclass(frozen=True, slots=True)
class Hook:
    """A hook as its provider tells of it.

    Args:
        id: its number or name there; None where the provider made it and did not say.
        url: where it sends to; None where the provider does not say.
        events: what it sends.
        active: whether it sends at all.
        last: what became of its last delivery, where the provider says so.
    """

    id: str | None
    url: str | None
    events: tuple[str, ...]
    active: bool
    last: str | None = None


def parsed(text: str) -> Target:
    """Read a target as it is written on the command line.

    Raises:
        ValueError: for a person.
    """
    where, *more = text.split(",")
    if where == "shortcut" and not more:
        return Target("shortcut")
    provider, _, repository = where.partition(":")
    if provider != "github" or not _REPOSITORY.fullmatch(repository):
        wrong = "Shortcut sends every event: leave the rest out" if where == "shortcut" else f"write it as {FORM}"
        raise ValueError(f"{text!r}: {wrong}")
    events: tuple[str, ...] = ()
    if more:
        more[0] = more[0].removeprefix("events=") if more[0].startswith("events=") else ""
        events = tuple(dict.fromkeys(more))
        wrong_ones = [event for event in events if not _EVENT.fullmatch(event)]
        if wrong_ones:
            raise ValueError(f"{text!r}: name events as GitHub does, such as ,events=issues,pull_request")
    return Target("github", repository, events)


def source_of(target: Target, consumer: Consumer, named: str | None = None) -> Source:
    """Return the source that a target's deliveries belong to.

    Args:
        target: where the hook is registered.
        consumer: whose sources.
        named: the source asked for; None takes the one named like the provider, or the provider's only one.

    Raises:
        ConfigurationError: there is none, or which is meant cannot be told.
    """
    fitting = {name: one for name, one in consumer.sources.items() if isinstance(one, KINDS[target.provider])}
    wanted = named if named is not None else target.provider
    if wanted in fitting:
        return fitting[wanted]
    if named is not None or len(fitting) != 1:
        listed = ", ".join(fitting) or "none"
        raise ConfigurationError(
            f"which source are the deliveries of {target} for? --source names one; those of its kind: {listed}"
        )
    return next(iter(fitting.values()))


def events_for(target: Target, source: Source) -> tuple[str, ...]:
    """Return what a hook subscribes to: what was named, else what the consumer handles, else everything."""
    handled = {name.partition(".")[0] for name in source.handlers} - _SENT_ANYWAY
    return target.events or tuple(sorted(handled)) or EVERYTHING


def same_address(one: str | None, other: str) -> bool:
    """Say whether two addresses lead to the same place: letter case of the host and a last slash aside."""
    return one is not None and _plain(one) == _plain(other)


def _plain(url: str) -> Collection[object]:
    try:
        parts = urlsplit(url)
        port = parts.port or {"https": 443, "http": 80}.get(parts.scheme.lower())
    except ValueError:
        return (url,)
    return (parts.scheme.lower(), (parts.hostname or "").lower(), port, parts.path.rstrip("/"), parts.query)
