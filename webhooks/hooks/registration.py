"""A hook that is there as long as a tunnel is: made, or one that is there already reused; removed at the end.

The order is what makes it safe: the record first, then the call, then its answer in the record; at the end the hook
first, then the record. Wherever a kill falls, the next start finds no hook, or a record that leads to it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from webhooks.errors import ConfigurationError, ProviderError
from webhooks.hooks.github import GitHubHooks
from webhooks.hooks.left_behind import Entry, Record, forget, left_behind, recorded
from webhooks.hooks.shortcut import BY_HAND, ShortcutHooks
from webhooks.hooks.target import Hook, Target
from webhooks.provider_api import github_client, shortcut_client
from webhooks.settings import Settings

Tell = Callable[[str], None]


class Hooks(Protocol):
    """What is asked of a provider."""

    async def at(self, url: str) -> list[Hook]: ...
    async def create(self, url: str, secret: str, events: Sequence[str]) -> Hook: ...
    async def change(self, id: str, url: str, secret: str, events: Sequence[str], *, replace: bool) -> Hook | None: ...
    async def remove(self, id: str) -> bool: ...


@asynccontextmanager
async def hooks_at(settings: Settings, target: Target) -> AsyncGenerator[Hooks]:
    """Open a connection to a target's provider.

    Raises:
        ConfigurationError: there is no token for it; the message names the setting.
    """
    if target.repository is not None:
        async with github_client(settings) as client:
            yield GitHubHooks(client, target.repository)
    else:
        async with shortcut_client(settings) as client:
            yield ShortcutHooks(client)


async def reachable(settings: Settings, target: Target) -> None:
    """Ask a target's provider for its hooks: what a token may not do is known before anything is opened.

    Raises:
        ConfigurationError: there is no token.
        ProviderError: the provider refuses it, or does not answer.
    """
    async with hooks_at(settings, target) as hooks:
        await hooks.at("")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be registered.

    Args:
        target: where.
        url: where the deliveries are to be sent.
        events: which, as GitHub calls them.
        secret: what a new hook signs with.
        lasting_secret: what a hook that is there already signs with from now on: it stays at the end, so it must be
            one that the receiver knows then, too.
    """

    target: Target
    url: str
    events: tuple[str, ...]
    secret: str = field(repr=False)
    lasting_secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Registered:
    """A hook that is there.

    Args:
        hook: what the provider says of it.
        reused: whether it was there before, so that it is not ours to remove.
    """

    hook: Hook
    reused: bool


@asynccontextmanager
async def registered(settings: Settings, wanted: Wanted, record: Record, tell: Tell) -> AsyncGenerator[Registered]:
    """Have a hook for the block, however it ends.

    Args:
        settings: the environment.
        wanted: which.
        record: where each step is written; taken away at the end if nothing is left.
        tell: called with what a person should know at the end.

    Raises:
        ProviderError: the provider did not make it; what it may have made all the same is removed.
        ConfigurationError: there is no token.
    """
    async with hooks_at(settings, wanted.target) as hooks:
        before = [hook.id for hook in await hooks.at(wanted.url) if hook.id is not None]
        if before:
            record.note("reused", before[0])
            changed = await hooks.change(before[0], wanted.url, wanted.lasting_secret, wanted.events, replace=False)
            if changed is not None:
                yield Registered(changed, reused=True)
                return
        made: Hook | None = None
        refused = False
        record.note("asked", before=before)
        try:
            made = await hooks.create(wanted.url, wanted.secret, wanted.events)
            record.note("made", made.id)
            yield Registered(made, reused=False)
        except ProviderError as error:
            refused = made is None and error.status is not None and error.status < 500
            raise
        finally:
            if refused:
                record.remove()
            else:
                others = [entry for entry in recorded(settings.home) if entry.path != record.path]
                await _undone(hooks, wanted, made, before, others, record, tell)


async def _undone(
    hooks: Hooks,
    wanted: Wanted,
    made: Hook | None,
    before: Collection[str],
    others: Collection[Entry],
    record: Record,
    tell: Tell,
) -> None:
    """Remove what was made, or may have been made; what cannot be removed now stays on record."""
    try:
        if made is not None:
            id = made.id
        else:
            id = await _new_at(hooks, wanted.target, wanted.url, before, others, tell)
        holder = _holder(wanted.target, id, others)
        if id is not None and holder is None:
            await hooks.remove(id)
            tell(f"removed the hook {id} at {wanted.target}")
        elif holder is not None:
            tell(f"the hook {id} stays at {wanted.target}: another record names it")
            if holder.state != "lasting":
                return  # seen to once that one's process has ended
        elif made is not None or wanted.target.repository is None:
            tell(_by_hand(wanted.url))
        record.remove()
    except ProviderError as error:
        tell(f"the hook to {wanted.url} is still at {wanted.target}; the next start of a tunnel removes it. {error}")


async def tidied(settings: Settings, tell: Tell) -> None:
    """Remove the hooks that killed tunnels left behind, and their records.

    Args:
        settings: the environment.
        tell: called with what a person should know.
    """
    with left_behind(settings.home) as entries:
        everything, dead = recorded(settings.home), {entry.path for entry in entries}
        for entry in entries:
            others = [other for other in everything if other.path != entry.path]
            living = [other for other in others if other.path not in dead]
            # What killed tunnels reused together keeps none of them from removing what it made for certain.
            kept = _holder(entry.target, entry.id, living)
            if kept is not None and entry.state == "made":
                tell(f"an earlier tunnel left the hook {entry.id} at {entry.target}: another record names it, it stays")
                if kept.state == "lasting":
                    forget(entry)
                continue
            try:
                await _tidied(settings, entry, others, tell)
            except (ProviderError, ConfigurationError) as error:
                tell(f"an earlier tunnel left a hook at {entry.target}, to {entry.url}, that is still there: {error}")
            else:
                forget(entry)


async def _tidied(settings: Settings, entry: Entry, others: Collection[Entry], tell: Tell) -> None:
    if entry.state in ("planned", "reused"):
        return
    id = entry.id
    async with hooks_at(settings, entry.target) as hooks:
        if id is None:
            # Killed between the call and its answer: what it made, if it made anything, is known by its address.
            id = await _new_at(hooks, entry.target, entry.url, entry.before, others, tell)
        if id is not None:
            there = await hooks.remove(id)
            became = "removed" if there else "it is gone already"
            tell(f"an earlier tunnel left the hook {id} at {entry.target}: {became}")
        elif entry.target.repository is None:
            tell(_by_hand(entry.url))


async def _new_at(
    hooks: Hooks, target: Target, url: str, before: Collection[str], others: Collection[Entry], tell: Tell
) -> str | None:
    """Return the one hook that sends to an address, was not there before, and that no other record names."""
    found = [hook.id for hook in await hooks.at(url) if hook.id is not None and hook.id not in before]
    new = [id for id in found if _holder(target, id, others) is None]
    if len(new) > 1:
        tell(f"several hooks at {target} send to {url}, and which was made from here is not known: {', '.join(new)}")
        return None
    return next(iter(new), None)


def _holder(target: Target, id: str | None, others: Collection[Entry]) -> Entry | None:
    """Return a record that names a hook: a lasting one before any other."""
    where = (target.provider, target.repository, id)
    naming = [one for one in others if id and (one.target.provider, one.target.repository, one.id) == where]
    return next((one for one in naming if one.state == "lasting"), next(iter(naming), None))


def _by_hand(url: str) -> str:
    return f"Shortcut did not say which hook it made, so it cannot be removed from here: look for {url} in {BY_HAND}"
