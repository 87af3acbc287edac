"""Hooks that are made to stay: on record before the provider is asked, so that none is there that nobody knows of."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from webhooks.errors import ConfigurationError, ProviderError
from webhooks.hooks.left_behind import Entry, forget, record, recorded
from webhooks.hooks.registration import hooks_at
from webhooks.hooks.target import EVERYTHING, Hook, Target, events_for, same_address
from webhooks.settings import Settings
from webhooks.signatures import check_secret, new_secret
from webhooks.source_secrets import secret_variable, secrets_for
from webhooks.sources import Source


@dataclass(frozen=True, slots=True)
class Lasting:
    """A hook that was made, or changed.

    Args:
        hook: as it is now.
        before: as it was, None where it is new.
        secret: what it signs with.
        is_new: whether nobody else knows that secret yet.
    """

    hook: Hook
    before: Hook | None
    secret: str = field(repr=False)
    is_new: bool


async def make_lasting(settings: Settings, target: Target, source: Source, url: str, *, renew: bool) -> Lasting:
    """Make a hook that stays, or change the one that sends to the address already.

    Args:
        settings: the environment.
        target: where, and which events.
        source: whose deliveries it sends; it signs with the first secret of that source.
        url: where it sends to.
        renew: whether one that is there may get a new secret, where none is set.

    Raises:
        ConfigurationError: no token; no record can be kept; or its secret would change without anybody asking for that.
        ProviderError: the provider did not do it.
    """
    events = events_for(target, source)
    async with hooks_at(settings, target) as hooks:
        there = await hooks.at(url)
        before = there[0] if there else _made_before(settings, target, url)
        secret, is_new = _secret(source)
        if before is not None and is_new and not renew:
            raise ConfigurationError(
                f"the hook {before.id} at {target} sends there already, and what it signs with cannot be read back: "
                f"set {secret_variable(source.name)} to the receiver's secret, or give it a new one with --new-secret"
            )
        with record(settings.home, Target(target.provider, target.repository), source.name, url) as kept:
            # Of what was made to stay nothing is ever tidied away, whatever becomes of this call.
            kept.note("lasting")
            try:
                hook = None
                if before is not None and before.id is not None:
                    hook = await hooks.change(before.id, url, secret, events, replace=bool(target.events))
                changed = hook is not None
                hook = hook or await hooks.create(url, secret, events)
            except ProviderError as error:
                if target.repository is not None or (error.status is not None and error.status < 500):
                    kept.remove()  # GitHub has a list to find it in; Shortcut may have made one that nobody can name
                raise
            if hook.id is not None:
                kept.note("lasting", hook.id)
            else:
                kept.remove()
            if before is not None and before.id is not None:
                forget_lasting(settings, target, before.id, but=kept.path)
    return Lasting(hook, before if changed else None, secret, is_new)


def made_here(settings: Settings, target: Target) -> list[Entry]:
    """Return the records of hooks at a place."""
    where = (target.provider, target.repository)
    return [entry for entry in recorded(settings.home) if (entry.target.provider, entry.target.repository) == where]


def ids_here(settings: Settings, target: Target, address: str) -> list[str]:
    """Return the ids of Shortcut's hooks that were made to stay for an address: it has no list of its own."""
    if target.provider != "shortcut":
        return []
    lasting = [entry for entry in made_here(settings, target) if entry.state == "lasting"]
    return [entry.id for entry in lasting if entry.id is not None and sends_to(entry.url, address)]


def forget_lasting(settings: Settings, target: Target, id: str, *, but: Path | None = None) -> None:
    """Take the records of a hook away that was made to stay and is there no more, or is in another record now."""
    for entry in made_here(settings, target):
        if entry.id == id and entry.state == "lasting" and entry.path != but:
            forget(entry)


def sends_to(url: str | None, address: str) -> bool:
    """Say whether a hook sends to an address, or to a source's place under it, as it was given when it was made."""
    base, inside, _ = (url or "").rpartition("/webhooks/")
    return same_address(url, address) or (bool(inside) and same_address(base, address))


def _made_before(settings: Settings, target: Target, url: str) -> Hook | None:
    return next((Hook(id, url, EVERYTHING, active=True) for id in ids_here(settings, target, url)), None)


def _secret(source: Source) -> tuple[str, bool]:
    for secret in secrets_for(source.name):
        check_secret(source.recipe, secret)
        return secret, False
    return new_secret(source.recipe), True
