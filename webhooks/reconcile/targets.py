"""Whose deliveries to look after: a repository's hook, an organization's, or a GitHub App's own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from webhooks.errors import ConfigurationError

_REPOSITORY = re.compile(r"(?!\.{1,2}/)[A-Za-z0-9._-]{1,100}/(?!\.{1,2}$)[A-Za-z0-9._-]{1,100}")
_ORGANIZATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,99}")
_HOOK = re.compile(r"[1-9][0-9]{0,17}")
FORMS = "write OWNER/NAME:HOOK, OWNER/NAME, org:ORG:HOOK or app, each perhaps with =SOURCE, separated by commas"


@dataclass(frozen=True, slots=True)
class Target:
    """A hook at GitHub, perhaps one that is still to be found.

    Args:
        kind: what it belongs to.
        name: `owner/name` or the organization; empty for an app.
        hook: its id; None: the only one that points to a receiver like ours. An app has one without a number.
    """

    kind: Literal["repo", "org", "app"]
    name: str = ""
    hook: int | None = None

    @property
    def hooks_path(self) -> str:
        """Where the hooks are in the API."""
        return f"/{self.kind}s/{self.name}/hooks"

    def __str__(self) -> str:
        owner = {"repo": self.name, "org": f"the organization {self.name}", "app": "the app"}[self.kind]
        return owner if self.hook is None else f"hook {self.hook} of {owner}"


def repository(name: str, hook: int | None = None) -> Target:
    """Return a repository's hook.

    Raises:
        ValueError: `name` is not `owner/name`.
    """
    if not _REPOSITORY.fullmatch(name):
        raise ValueError(f"{name!r} is no repository: write OWNER/NAME")
    return Target("repo", name, hook)


def organization(name: str, hook: int | None = None) -> Target:
    """Return an organization's hook.

    Raises:
        ValueError: `name` cannot be one.
    """
    if not _ORGANIZATION.fullmatch(name):
        raise ValueError(f"{name!r} is no organization")
    return Target("org", name, hook)


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A hook that is looked after on a schedule, and the name of our source where that must be said."""

    target: Target
    source: str | None


def scheduled(setting: str | None) -> tuple[Scheduled, ...]:
    """Read `WEBHOOKS_RECONCILE_GITHUB`.

    Raises:
        ConfigurationError: a part of it cannot be read; the message says which, and the forms there are.
    """
    parts = [part.strip() for part in (setting or "").split(",") if part.strip()]
    return tuple(dict.fromkeys(_scheduled(part) for part in parts))


def _scheduled(text: str) -> Scheduled:
    named, _, source = (part.strip() for part in text.partition("="))
    of_organization = named.startswith("org:")
    name, _, hook = named.removeprefix("org:").partition(":")
    try:
        if hook and not _HOOK.fullmatch(hook):
            raise ValueError(f"{hook!r} is no hook's id")
        number = int(hook) if hook else None
        target = Target("app") if named == "app" else (organization if of_organization else repository)(name, number)
    except ValueError as error:
        raise ConfigurationError(f"WEBHOOKS_RECONCILE_GITHUB: {error}; {FORMS}") from None
    return Scheduled(target, source or None)
