"""`webhooks hooks`: lasting hooks at GitHub and Shortcut."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import NoReturn

import click
from rich.table import Table
from rich.text import Text

from webhooks.cli.app import app_option, console, examples, run
from webhooks.cli.saying import in_line, say
from webhooks.cli.targets import PLACE, TARGET, events_of
from webhooks.errors import ConfigurationError
from webhooks.hooks import Hook, Target, hooks_at, source_of
from webhooks.hooks.github import GitHubHooks
from webhooks.hooks.lasting import forget_lasting, ids_here, made_here, make_lasting, sends_to
from webhooks.hooks.shortcut import BY_HAND, ShortcutHooks
from webhooks.loading import load_consumer
from webhooks.sending import target as delivery_url
from webhooks.settings import Settings
from webhooks.source_secrets import secret_variable
from webhooks.sources import Source


@click.group(
    no_args_is_help=False,
    epilog=examples(
        "webhooks hooks list github:acme/shop",
        "webhooks hooks create github:acme/shop,events=issues,pull_request --url https://hooks.example.com",
        "webhooks hooks delete shortcut 5f0c7a5e-0001 --yes",
    ),
)
def hooks() -> None:
    """List, make and remove hooks at GitHub and Shortcut.

    They last; webhooks tunnel --register makes one that is removed with the tunnel. GitHub needs WEBHOOKS_GITHUB_TOKEN
    (admin:repo_hook), Shortcut WEBHOOKS_SHORTCUT_TOKEN.
    """


@hooks.command("list")
@click.argument("target", type=PLACE)
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
        table.add_column(name)
    for hook in found:
        state = Text("active") if hook.active else Text("off", style="red")
        told = (in_line(text or "") for text in (hook.id, hook.url, events_of(hook)))
        table.add_row(*told, state, in_line(hook.last or ""))
    console().print(table)


async def _listed(settings: Settings, target: Target) -> list[Hook]:
    async with hooks_at(settings, target) as provider:
        if isinstance(provider, GitHubHooks):
            return await provider.listed()
        assert isinstance(provider, ShortcutHooks)
        found: list[Hook] = []
        for entry in made_here(settings, target):
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
@click.option("--new-secret", is_flag=True, help="Give a hook that is there already a new secret, where none is set.")
@app_option
@click.option("--json", "as_text", is_flag=True, help="As JSON, for programs.")
def create(target: Target, url: str, source: str | None, new_secret: bool, app: str, as_text: bool) -> None:
    """Make a hook that lasts; one that sends to the same address already is changed instead.

    It signs with the first secret of WEBHOOKS_SECRET_<SOURCE>. Without one a secret is made and shown, once: the
    receiver needs it. Without events= a hook of GitHub sends the events that the consumer has handlers for; with it,
    one that is there already sends these from now on, and no others.
    """
    settings = Settings.load()
    sender = source_of(target, load_consumer(app), source)
    made = run(make_lasting(settings, target, sender, _address(url, sender), renew=new_secret))
    hook, before = made.hook, made.before
    if as_text:
        secret = made.secret if made.is_new else None
        click.echo(json.dumps({**asdict(hook), "changed": before is not None, "secret": secret}, indent=2))
        return
    say(f"{'made' if before is None else 'changed'} the hook {hook.id or '(Shortcut does not say which)'} at {target}")
    earlier = "" if before is None or before.events == hook.events else f"; it sent {events_of(before)} before"
    say(f"  it sends {events_of(hook)} to {hook.url}{earlier}")
    if made.is_new:
        again = "" if before is None else "; what it signed with before is of no use any more"
        say(f"  it signs with a new secret, which is shown only now{again}")
        say(f"  start the receiver with {secret_variable(sender.name)}={made.secret}")
    else:
        say(f"  it signs with the secret of {secret_variable(sender.name)}")
    if hook.id is None:
        click.echo(f"  it can be removed by hand only: {BY_HAND}", err=True)


def _address(url: str, source: Source) -> str:
    suffix = f"/webhooks/{source.name}"
    return delivery_url(url.rstrip("/").removesuffix(suffix), source.name)


@hooks.command()
@click.argument("target", type=PLACE)
@click.argument("which", metavar="ID_OR_URL")
@click.option("--yes", is_flag=True, help="Do not ask.")
def delete(target: Target, which: str, yes: bool) -> None:
    """Remove a hook, by its id or by the address it sends to, with or without /webhooks/{source}."""
    settings = Settings.load()
    hook = run(_found(settings, target, which))
    if not yes and not _agreed(target, hook):
        raise click.ClickException(f"nothing was removed: the hook {hook.id} stays at {target}")
    there = run(_removed(settings, target, str(hook.id)))
    say(f"removed the hook {hook.id} at {target}" if there else f"the hook {hook.id} was gone already")


def _agreed(target: Target, hook: Hook) -> bool:
    """Ask a person.

    Raises:
        click.UsageError: there is nobody to ask.
    """
    sends = f", which sends to {hook.url}" if hook.url else ""
    try:
        return click.confirm(in_line(f"Remove the hook {hook.id} at {target}{sends}?"))
    except click.Abort:
        if sys.stdin.isatty():  # Ctrl-C
            raise
        raise click.UsageError("there is nobody to ask: --yes removes it without a question") from None


async def _found(settings: Settings, target: Target, which: str) -> Hook:
    async with hooks_at(settings, target) as provider:
        if isinstance(provider, GitHubHooks):
            fitting = [hook for hook in await provider.listed() if hook.id == which or sends_to(hook.url, which)]
            if len(fitting) != 1:
                _not_one(target, which, len(fitting))
            return fitting[0]
        assert isinstance(provider, ShortcutHooks)
        ids = ids_here(settings, target, which)
        if len(ids) > 1:
            _not_one(target, which, len(ids))
        id = ids[0] if ids else which
        hook = await provider.one(id) if "/" not in id else None
        if hook is None:
            forget_lasting(settings, target, id)
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
    forget_lasting(settings, target, id)
    return there
