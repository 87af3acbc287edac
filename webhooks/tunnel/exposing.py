"""The receiver on the internet, for as long as a block runs: the program, the probe, the hook.

In this order, each undone at the end the other way round: hooks that a killed tunnel left behind are removed; the
program gives an address; a probe shows that it leads to this receiver and to nothing private; only then is a hook
registered there. A hook gets a secret of its own, which a receiver started with `serve --dev` accepts as long as its
record is there; any other receiver knows only what it was started with, so that is what the hook gets.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from webhooks.consumer import Consumer
from webhooks.db import ended
from webhooks.errors import ConfigurationError
from webhooks.hooks import Registered, Target, Wanted, events_for, record, registered
from webhooks.hooks.registration import Tell
from webhooks.settings import Settings
from webhooks.signatures import new_secret
from webhooks.source_secrets import secret_variable, secrets_found
from webhooks.sources import Source
from webhooks.tunnel.presence import missing
from webhooks.tunnel.probe import WITHIN_S, NotReached, made, reached, takes
from webhooks.tunnel.programs import Program
from webhooks.tunnel.running import Running, running


def signing_secret(source: Source, settings: Settings) -> str:
    """Return one with which a probe can be signed.

    Raises:
        ConfigurationError: none is known here, or none can sign.
    """
    for secret in secrets_found(settings.home, source.name):
        try:
            made(source, secret, 0)
        except ConfigurationError:
            continue  # a public key
        return secret
    raise ConfigurationError(
        f"no secret of {source.name} to sign with: set {secret_variable(source.name)} to the receiver's, or start it "
        "in this directory with webhooks serve --dev"
    )


def probed_source(consumer: Consumer, settings: Settings, named: str | None) -> tuple[Source, str]:
    """Return a source, and a secret of it, that a probe can be signed with.

    Raises:
        ConfigurationError: there is none.
    """
    if named is not None:
        source = consumer.sources[named]
        return source, signing_secret(source, settings)
    reasons: list[str] = []
    for source in consumer.sources.values():
        try:
            return source, signing_secret(source, settings)
        except ConfigurationError as error:
            reasons.append(str(error))
    raise ConfigurationError(reasons[0] if reasons else "the consumer has no source")


@asynccontextmanager
async def exposed(program: Program, local: str, source: Source, secret: str, tell: Tell) -> AsyncGenerator[Running]:
    """Have the receiver reachable from the internet for the block.

    Args:
        program: what makes it so.
        local: the receiver's base address.
        source: whose probe is sent.
        secret: what it is signed with.
        tell: called with how far it is.

    Raises:
        ConfigurationError: the program is not installed.
        ProgramFailed: it did not do its work.
        NotReached: no receiver answers, or the address does not lead to it, or leads to more.
    """
    # A receiver that is not there is the commonest mistake: known before anything is opened.
    if told := await missing(local):
        raise NotReached(told)
    await reached(local, local, source, secret, within_s=0)
    async with running(program, tell) as started:
        tell(f"it gave {started.url}")
        tell(f"probing whether that leads to {local}, for {WITHIN_S:.0f} s at most")
        probing = asyncio.create_task(_probed(started, local, source, secret, tell), name="probe")
        try:
            await asyncio.wait({probing, started.ended}, return_when=asyncio.FIRST_COMPLETED)
            if not probing.done():
                raise started.failed("while its address was probed")
            await probing
        finally:
            await ended([probing])
        yield started


async def _probed(started: Running, local: str, source: Source, secret: str, tell: Tell) -> None:
    await asyncio.sleep(started.program.settle_s)
    await reached(started.url, local, source, secret, tell=tell)


@asynccontextmanager
async def registering(
    settings: Settings, target: Target, source: Source, local: str, url: str, tell: Tell
) -> AsyncGenerator[Registered]:
    """Have a hook at a provider for the block.

    Args:
        settings: the environment.
        target: where.
        source: whose deliveries.
        local: the receiver's base address.
        url: where the hook sends to.
        tell: called with what a person should know.

    Raises:
        ProviderError: the provider did not make it.
        ConfigurationError: no token, or no secret.
        NotReached: no receiver answers at `local`.
    """
    own = signing_secret(source, settings)
    fresh = new_secret(source.recipe)
    with record(settings.home, target, source.name, url, secret=fresh) as kept:
        secret = fresh if await takes(local, source, fresh) else own
        if secret == own:
            tell("the receiver takes no new secrets (serve --dev does): the hook signs with one that it has")
        wanted = Wanted(target, url, events_for(target, source), secret, own)
        async with registered(settings, wanted, kept, tell) as found:
            yield found
