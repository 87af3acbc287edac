"""`webhooks hooks`: lasting hooks at GitHub and Shortcut."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, NoReturn

import click
from rich.table import Table
from rich.text import Text

from webhooks.cli.app import app_option, console, examples, printable, run
from webhooks.errors import ConfigurationError, ProviderError
from webhooks.hooks import Hook, Target, events_for, hooks_at, parsed, record, source_of
from webhooks.hooks.github import GitHubHooks
from webhooks.hooks.left_behind import Entry, forget, recorded
from webhooks.hooks.shortcut import BY_HAND, ShortcutHooks
from webhooks.hooks.target import same_address
from webhooks.loading import load_consumer
from webhooks.sending import target as delivery_url
from webhooks.settings import Settings
from webhooks.signatures import check_secret, new_secret
from webhooks.source_secrets import secret_variable, secrets_for
from webhooks.sources import Source


class TargetType(click.ParamType[Target]):
    """`github:OWNER/REPO[,events=…]` or `shortcut`."""

    name = "target"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Target:
        if isinstance(value, Target):
            return value
        try:
            return parsed(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


TARGET = TargetType()


@click.group(
    epilog=examples(
        "webhooks hooks list github:acme/shop",
        "webhooks hooks create github:acme/shop,events=issues,pull_request --url https://hooks.example.com",
        "webhooks hooks delete shortcut 5f0c7a5e-0001 --yes",
    )
)
def hooks() -> None:
    """List, make and remove hooks at GitHub and Shortcut.

    They last; webhooks tunnel --register makes one that is removed with the tunnel. GitHub needs WEBHOOKS_GITHUB_TOKEN
    (admin:repo_hook), Shortcut WEBHOOKS_SHORTCUT_TOKEN.
    """


@hooks.command("list")
@click.argument("target", type=TARGET)
@click.option("--json", "as_text", is_flag=True, help="As JSON, for programs.")
def list_(target: Target, as_text: bool) -> None:
    """List the hooks of a repository, or those of Shortcut that were made from here.

    Shortcut itself has no list: what somebody else made there is seen only in its settings.
    """
    settings = Settings.load()
    found = run(_listed(settings, target))
    if as_text:
        click.echo(json.dumps([asdict(hook) for hook in found], indent=2))
        return
    if not found:
        click.echo(f"{target} has no hooks" if target.repository else "Shortcut has no hooks that were made from here")
        return
    table = Table(box=None, pad_edge=False)
    for name in ("ID", "URL", "EVENTS", "STATE", "LAST DELIVERY"):
        table.add_column(name, overflow="fold")
    for hook in found:
        state = Text("active") if hook.active else Text("off", style="red")
        events = ", ".join(hook.events)
        table.add_row(
            *(printable(text or "") for text in (hook.id, hook.url, events)), state, printable(hook.last or "")
        )
    console().print(table)


async def _listed(settings: Settings, target: Target) -> list[Hook]:
    async with hooks_at(settings, target) as provider:
        if isinstance(provider, GitHubHooks):
            return await provider.listed()
        assert isinstance(provider, ShortcutHooks)
        found: list[Hook] = []
        for entry in _made_here(settings, target):
            hook = await provider.one(entry.id) if entry.id else None
            if hook is not None:
                found.append(hook)
        return found


@hooks.command()
@click.argument("target", type=TARGET)
@click.option(
    "--url", required=True, metavar="BASE", help="The receiver's public address; /webhooks/{source} is added."
)
@click.option("--source", help="Which of several sources of the provider the deliveries are for.")
@app_option
@click.option("--json", "as_text", is_flag=True, help="As JSON, for programs.")
def create(target: Target, url: str, source: str | None, app: str, as_text: bool) -> None:
    """Make a hook that lasts; one that sends to the same address already is changed instead.

    It signs with the first secret of WEBHOOKS_SECRET_<SOURCE>. Without one a secret is made and shown, once: the
    receiver needs it. Without events= a hook of GitHub sends the events that the consumer has handlers for.
    """
    settings = Settings.load()
    sender = source_of(target, load_consumer(app), source)
    secret, is_new = _secret(sender)
    hook, changed = run(_created(settings, target, sender, _address(url, sender), secret))
    if as_text:
        said = {**asdict(hook), "changed": changed, "secret": secret if is_new else None}
        click.echo(json.dumps(said, indent=2))
        return
    click.echo(f"{'changed' if changed else 'made'} the hook {hook.id or '(Shortcut does not say which)'} at {target}")
    click.echo(f"  sends {', '.join(hook.events)} to {hook.url}")
    if is_new:
        click.echo(f"  start the receiver with {secret_variable(sender.name)}={secret}")
    else:
        click.echo(f"  signs with the secret of {secret_variable(sender.name)}")
    if hook.id is None:
        click.echo(f"  it can be removed by hand only: {BY_HAND}", err=True)


def _secret(source: Source) -> tuple[str, bool]:
    for secret in secrets_for(source.name):
        check_secret(source.recipe, secret)
        return secret, False
    return new_secret(source.recipe), True


def _address(url: str, source: Source) -> str:
    suffix = f"/webhooks/{source.name}"
    return delivery_url(url.rstrip("/").removesuffix(suffix), source.name)


async def _created(settings: Settings, target: Target, source: Source, url: str, secret: str) -> tuple[Hook, bool]:
    events = events_for(target, source)
    async with hooks_at(settings, target) as provider:
        existing = next(iter(await provider.at(url)), None)
        id = existing.id if existing is not None else _id_here(settings, target, url)
        if isinstance(provider, ShortcutHooks):
            return await _created_at_shortcut(settings, provider, source, url, secret, id)
        if id is not None:
            changed = await provider.change(id, url, secret, events, replace=bool(target.events))
            if changed is not None:
                return _lasting(settings, target, source, url, changed), True
        return _lasting(settings, target, source, url, await provider.create(url, secret, events)), False


def _lasting(settings: Settings, target: Target, source: Source, url: str, hook: Hook) -> Hook:
    """Put a hook on record as one that stays, so that none takes it for what a killed tunnel left behind."""
    if hook.id is not None:
        _forget(settings, target, hook.id)
        with record(settings.home, Target(target.provider, target.repository), source.name, url) as kept:
            kept.note("lasting", hook.id)
    return hook


async def _created_at_shortcut(
    settings: Settings, provider: ShortcutHooks, source: Source, url: str, secret: str, id: str | None
) -> tuple[Hook, bool]:
    """Make a hook, and keep its id: there is no other way to find it again."""
    with record(settings.home, Target("shortcut"), source.name, url) as kept:
        if id is not None:
            await provider.remove(id)
            _forget(settings, Target("shortcut"), id)
        kept.note("asked")
        try:
            hook = await provider.create(url, secret, ())
        except ProviderError as error:
            if error.status is not None and error.status < 500:
                kept.remove()
            raise
        if hook.id is not None:
            kept.note("lasting", hook.id)
        else:
            kept.remove()
    return hook, id is not None


@hooks.command()
@click.argument("target", type=TARGET)
@click.argument("which", metavar="ID_OR_URL")
@click.option("--yes", is_flag=True, help="Do not ask.")
def delete(target: Target, which: str, yes: bool) -> None:
    """Remove a hook, by its id or by the address it sends to."""
    settings = Settings.load()
    hook = run(_found(settings, target, which))
    if not yes:
        sends = f", which sends to {printable(hook.url)}" if hook.url else ""
        click.confirm(f"Remove the hook {hook.id} at {target}{sends}?", abort=True)
    there = run(_removed(settings, target, str(hook.id)))
    click.echo(f"removed the hook {hook.id} at {target}" if there else f"the hook {hook.id} was gone already")


async def _found(settings: Settings, target: Target, which: str) -> Hook:
    async with hooks_at(settings, target) as provider:
        if isinstance(provider, GitHubHooks):
            fitting = [hook for hook in await provider.listed() if hook.id == which or same_address(hook.url, which)]
            if len(fitting) != 1:
                _not_one(target, which, len(fitting))
            return fitting[0]
        assert isinstance(provider, ShortcutHooks)
        id = _id_here(settings, target, which) or which
        hook = await provider.one(id) if "/" not in id else None
        if hook is None:
            _forget(settings, target, id)
            _not_one(target, which, 0)
        return hook


def _not_one(target: Target, which: str, count: int) -> NoReturn:
    listed = f"webhooks hooks list {target} shows them"
    if count:
        raise ConfigurationError(f"{count} hooks at {target} send to {which}: name one by its id; {listed}")
    raise ConfigurationError(f"{target} has no hook {which}; {listed}")


async def _removed(settings: Settings, target: Target, id: str) -> bool:
    async with hooks_at(settings, target) as provider:
        there = await provider.remove(id)
    _forget(settings, target, id)
    return there


def _made_here(settings: Settings, target: Target) -> list[Entry]:
    where = (target.provider, target.repository)
    return [entry for entry in recorded(settings.home) if (entry.target.provider, entry.target.repository) == where]


def _id_here(settings: Settings, target: Target, url: str) -> str | None:
    """Return the id of a hook of Shortcut's that was made from here for an address."""
    if target.provider != "shortcut":
        return None
    entries = [entry for entry in _made_here(settings, target) if same_address(entry.url, url)]
    return next((entry.id for entry in entries if entry.state == "lasting"), None)


def _forget(settings: Settings, target: Target, id: str) -> None:
    for entry in _made_here(settings, target):
        if entry.id == id and entry.state == "lasting":
            forget(entry)
