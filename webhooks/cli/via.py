"""What `webhooks tunnel --via` does: the receiver on the internet, or a channel of smee.io followed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import click

from webhooks.cli.saying import say
from webhooks.cli.targets import events_of
from webhooks.consumer import Consumer
from webhooks.db import ended
from webhooks.errors import ConfigurationError
from webhooks.hooks import Registered, Target, hook_secrets, reachable, source_of, tidied
from webhooks.hooks.target import KINDS
from webhooks.sending import opened, target
from webhooks.settings import Settings
from webhooks.source_secrets import secrets_found
from webhooks.sources import Source
from webhooks.tunnel.exposing import exposed, probed_source, registering, signing_secret
from webhooks.tunnel.presence import missing
from webhooks.tunnel.programs import Program, cloudflared, ngrok, ssh
from webhooks.tunnel.relay import Relay, Signer
from webhooks.tunnel.report import Report
from webhooks.tunnel.session import OnError, Stopped
from webhooks.tunnel.smee import carry, follow

Way = Literal["cloudflared", "ngrok", "ssh", "smee"]
WAYS: tuple[Way, ...] = ("cloudflared", "ngrok", "ssh", "smee")
WAITING = "deliveries wait until then"


@dataclass(frozen=True, slots=True, kw_only=True)
class Via:
    """What was asked for.

    Args:
        way: the program, or `smee`.
        where: the server of ssh, or the channel of smee.
        sources: those named.
        to: the receiver's base address.
        public: the address that a server of one's own gives.
        remote_port: where ssh listens there.
        register: where hooks are registered.
        resign: whether what a channel tells of is signed anew.
        retries: how often it is posted again.
        on_error: what to do when it is refused.
    """

    way: Way
    where: str | None
    sources: tuple[str, ...]
    to: str
    public: str | None
    remote_port: int
    register: tuple[Target, ...]
    resign: bool
    retries: int
    on_error: OnError


def check(via: Via) -> None:
    """Refuse what does not go together.

    Raises:
        click.UsageError: it says what to leave out, or what is missing.
        ConfigurationError: the public address is none.
    """
    if via.way in ("ssh", "smee") and via.where is None:
        wanted = "the server: --via ssh nokey@localhost.run" if via.way == "ssh" else "the channel: --via smee URL"
        raise click.UsageError(f"name {wanted}")
    if via.way in ("cloudflared", "ngrok") and via.where is not None:
        raise click.UsageError(f"--via {via.way} takes no address: leave out {via.where}")
    if via.way != "smee" and via.resign:
        raise click.UsageError("--resign: here the provider itself posts to the receiver, nothing is signed on the way")
    if via.way != "ssh" and (via.public is not None or via.remote_port != 80):
        raise click.UsageError("--public and --remote-port go with --via ssh")
    if via.public is not None:
        target(via.public, "source")
    places = [(where.provider, where.repository) for where in via.register]
    if len(set(places)) < len(places):
        raise click.UsageError("--register names the same place twice: name all its events at once, by commas")


def run_via(via: Via, settings: Settings, consumer: Consumer) -> Coroutine[Any, Any, None]:
    """Return what is to run until it is stopped.

    Raises:
        ConfigurationError: a source was named that there is not.
    """
    for name in via.sources:
        if name not in consumer.sources:
            raise ConfigurationError(f"there is no source {name!r}; there are: {', '.join(consumer.sources) or 'none'}")
    return _through_channel(via, settings, consumer) if via.way == "smee" else _exposed(via, settings, consumer)


def _program(via: Via) -> Program:
    if via.way == "ssh":
        return ssh(via.to, str(via.where), port=via.remote_port, public=via.public)
    return cloudflared(via.to) if via.way == "cloudflared" else ngrok(via.to)


async def _exposed(via: Via, settings: Settings, consumer: Consumer) -> NoReturn:
    program = _program(via)
    wanted = [(where, _source_for(where, via, consumer)) for where in via.register]
    named = next(iter((*via.sources, *(sender.name for _, sender in wanted))), None)
    source, secret = probed_source(consumer, settings, named)
    await _ready_to_register(via, settings)
    async with AsyncExitStack() as stack:
        started = await stack.enter_async_context(exposed(program, via.to, source, secret, say))
        say(f"{started.url} leads to {via.to}, and to nothing else")
        for name in via.sources or consumer.sources:
            say(f"  {name}  {target(started.url, name)}")
        ours = 0
        for where, sender in wanted:
            url = target(started.url, sender.name)
            found = await stack.enter_async_context(registering(settings, where, sender, via.to, url, say))
            ours += not found.reused
            _tell_of(found, where)
        say("Ctrl-C ends it" + (f", and removes the hook{'s' if ours > 1 else ''}" if ours else ""))
        await asyncio.wait({started.ended})
        raise started.failed("while the tunnel was open", hint=False)


async def _through_channel(via: Via, settings: Settings, consumer: Consumer) -> None:
    channel = str(via.where)
    source = _source_of_channel(via, consumer)
    await _ready_to_register(via, settings)

    def known() -> tuple[str, ...]:
        """Return the secrets of the source: a hook that is made meanwhile gets one of its own."""
        return (*secrets_found(settings.home, source.name), *hook_secrets(settings.home).get(source.name, ()))

    async with AsyncExitStack() as stack:
        remote = await stack.enter_async_context(opened(channel))
        local = await stack.enter_async_context(opened(via.to))
        signer = None
        if via.resign:
            signing = signing_secret(source, settings)
            signer = Signer({source.name: source}, lambda _: signing)
            say("signed anew with the secret known here: the receiver's own check of the signature says nothing here")
        relay = Relay(local, via.to, retries=via.retries, tell=say, signer=signer)
        report = Report(say, consumer.sources)
        say(f"{channel} → {target(via.to, source.name)}")
        if not known() and not via.register:
            say(f"note: no secret of {source.name} is known here: a body that the channel wrote anew is not mended")
        if told := await missing(via.to, WAITING):
            say(f"note: {told}")
        ready = asyncio.Event()
        messages = follow(remote, channel, say, ready=ready, most_body_bytes=settings.max_body_bytes)
        carrying = asyncio.create_task(carry(messages, source, known, relay, report, via.on_error))
        stack.push_async_callback(ended, [carrying])
        try:
            # Followed first: what a hook sends as soon as it is made is not kept there.
            if via.register and await _first(ready, carrying):
                for where in via.register:
                    registration = registering(settings, where, source, via.to, channel, say)
                    _tell_of(await stack.enter_async_context(registration), where)
            await carrying
        except (asyncio.CancelledError, Stopped):
            say(f"{report.summary(connections=1)}; what is sent to the channel from now on is lost")
            raise


async def _ready_to_register(via: Via, settings: Settings) -> None:
    """See to what killed tunnels left behind, and that a hook can be made."""
    await tidied(settings, say)
    for where in via.register:
        await reachable(settings, where)


async def _first(event: asyncio.Event, task: asyncio.Task[None]) -> bool:
    """Wait until something has happened, and return whether it did before a task was over."""
    happened = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({happened, task}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await ended([happened])
    return event.is_set()


def _source_for(where: Target, via: Via, consumer: Consumer) -> Source:
    """Return the source of a hook: of those named, the one of its provider."""
    kind = KINDS[where.provider]
    named = [name for name in via.sources if isinstance(consumer.sources.get(name), kind)]
    return source_of(where, consumer, named[0] if len(named) == 1 else None)


def _source_of_channel(via: Via, consumer: Consumer) -> Source:
    """Return the one source that a channel's requests are for: the channel itself does not say."""
    registered = {_source_for(where, via, consumer).name for where in via.register}
    names = set(via.sources) or registered or set(consumer.sources)
    if len(names) != 1 or not registered <= names:
        raise ConfigurationError(
            f"which source are the channel's requests for? Name one with --source: {', '.join(consumer.sources)}"
        )
    [name] = names
    return consumer.sources[name]


def _tell_of(registered: Registered, where: Target) -> None:
    hook = registered.hook
    number = "" if hook.id is None else f" {hook.id}"
    if registered.reused:
        say(f"the hook{number} at {where} sends here already: it signs with the receiver's own secret now, and stays")
    else:
        say(f"registered the hook{number} at {where} for {events_of(hook)}")
