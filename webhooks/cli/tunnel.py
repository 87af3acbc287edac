"""`webhooks tunnel`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import cast
from urllib.parse import urlsplit

import click

from webhooks.cli.app import app_option, examples, run
from webhooks.cli.saying import failing_in_lines, say
from webhooks.cli.stopping import until_stopped
from webhooks.cli.targets import TARGET
from webhooks.cli.trigger import RECEIVER
from webhooks.cli.via import WAITING, WAYS, Via, Way, check, run_via
from webhooks.deliveries import since
from webhooks.errors import ConfigurationError
from webhooks.feed import NotAPlace, read_place
from webhooks.hooks import Target
from webhooks.loading import load_consumer
from webhooks.sending import on_this_machine, opened, target
from webhooks.settings import Settings
from webhooks.sources import Source
from webhooks.tunnel.bookmark import bookmark
from webhooks.tunnel.exposing import signing_secret
from webhooks.tunnel.follower import Follower
from webhooks.tunnel.presence import missing
from webhooks.tunnel.relay import Relay, Signer
from webhooks.tunnel.report import Report
from webhooks.tunnel.session import OnError, carry


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What was asked for, of a tunnel from a feed."""

    url: str
    sources: tuple[str, ...]
    to: str
    after: str | None
    token: str | None
    retries: int
    on_error: OnError
    resign: bool


def _read_after(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is None or value in ("now", "all"):
        return value
    with suppress(NotAPlace):
        read_place(value)
        return value
    try:
        time = since(value)
    except ValueError:
        message = f"{value[:100]!r}: write now, all, a time such as 1h or 2026-01-31T12:00, or a cursor"
        raise click.BadParameter(message, ctx, param) from None
    if isinstance(time, datetime) and time > datetime.now(UTC):
        raise click.BadParameter(f"{value} lies ahead: write now for what comes from here on", ctx, param)
    return value


@click.command(
    epilog=examples(
        "webhooks tunnel https://control.example.com --source github",
        "webhooks tunnel http://127.0.0.1:3101 --to http://127.0.0.1:8000 --since 1h --resign",
        "webhooks tunnel --via cloudflared --register github:acme/shop",
        "webhooks tunnel --via ssh nokey@localhost.run",
        "webhooks tunnel --via smee https://smee.io/abcdef --source github",
    )
)
@click.argument("url", required=False)
@app_option
@click.option("--via", type=click.Choice(WAYS), help="Without a deployed consumer. URL: ssh's server, smee's channel.")
@click.option(
    "--register",
    multiple=True,
    type=TARGET,
    help="With --via: a hook meanwhile; github:OWNER/REPO[,events=…] or shortcut.",
)
@click.option("--public", metavar="URL", help="With --via ssh: the address that leads to the forwarded port.")
@click.option(
    "--remote-port", type=click.IntRange(0, 65_535), default=80, help="With --via ssh: the port to listen on there."
)
@click.option("--source", "sources", multiple=True, metavar="NAME", help="Only this source; may be given again.")
@click.option(
    "--to",
    envvar="WEBHOOKS_RECEIVER_URL",
    default=RECEIVER,
    show_default=True,
    metavar="URL",
    help="The receiver here; /webhooks/{source} is added.",
)
@click.option(
    "--since",
    "after",
    metavar="PLACE",
    callback=_read_after,
    help="Start there: now, all, 1h, a date or time, or a cursor. Without it: where this tunnel left off, else now.",
)
@click.option("--follow-only", is_flag=True, help="Leave out what is waiting, and start with what comes now.")
@click.option("--token", help="Shown to the control plane; WEBHOOKS_TUNNEL_TOKEN keeps it out of the process list.")
@click.option("--retries", type=click.IntRange(0, 1000), default=3, show_default=True, help="How often to post again.")
@click.option(
    "--on-error",
    type=click.Choice(("stop", "skip")),
    default="stop",
    show_default=True,
    help="What to do when the receiver here refuses a delivery for good.",
)
@click.option("--resign", is_flag=True, help="Sign anew with the secrets known here, if the receiver here has others.")
@click.option("--allow-remote-target", is_flag=True, help="Let --to be another machine.")
def tunnel(
    url: str | None,
    app: str,
    via: Way | None,
    register: tuple[Target, ...],
    public: str | None,
    remote_port: int,
    sources: tuple[str, ...],
    to: str,
    after: str | None,
    follow_only: bool,
    token: str | None,
    retries: int,
    on_error: str,
    resign: bool,
    allow_remote_target: bool,
) -> None:
    """Bring the deliveries of a deployed consumer to a receiver here, exactly as they came.

    URL is the deployed consumer's control plane. A delivery counts as passed on when the receiver here has taken it;
    the place is kept in WEBHOOKS_HOME, so that after a sleep, a restart or a broken connection nothing is missing.

    With --via nothing needs to be deployed: cloudflared, ngrok or ssh gives the receiver here an address on the
    internet, and smee follows a channel of smee.io; what is sent while the tunnel does not run is lost then.

    Ctrl-C, or SIGTERM, ends it, and what it made is undone; a second one cuts that short. The exit code is 0 when it
    was ended so, 1 when it ended by itself, with the reason, and 130 when it was cut short.
    """
    if follow_only and after is not None:
        raise click.UsageError("--follow-only starts with what comes now, --since somewhere else: leave one out")
    check_target(to, allow_remote_target)
    settings = Settings.load()
    if via is not None:
        if after is not None or follow_only or token is not None:
            raise click.UsageError("--since, --follow-only and --token go with a deployed consumer, not with --via")
        asked = Via(
            way=via,
            where=url,
            sources=sources,
            to=to.rstrip("/"),
            public=public,
            remote_port=remote_port,
            register=register,
            resign=resign,
            retries=retries,
            on_error=cast("OnError", on_error),
        )
        check(asked)
        consumer = load_consumer(app)
        with failing_in_lines():
            run(until_stopped(run_via(asked, settings, consumer)))
        return
    if url is None:
        raise click.UsageError("name the deployed consumer's control plane, or a way with --via")
    if register or public is not None or remote_port != 80:
        raise click.UsageError("--register, --public and --remote-port go with --via")
    wanted = Wanted(
        url=url.rstrip("/"),
        sources=sources,
        to=to.rstrip("/"),
        after="now" if follow_only else after,
        token=token or settings.tunnel_token,
        retries=retries,
        on_error=cast("OnError", on_error),
        resign=resign,
    )
    known = _known(app, needed=resign)
    with failing_in_lines():
        run(until_stopped(_follow(wanted, settings, known)))


def check_target(to: str, allow_remote: bool) -> None:
    """Refuse to send what others wrote to anybody but this machine, unless that is asked for.

    Raises:
        ConfigurationError: it is another machine, or no address.
    """
    target(to, "source")
    if not allow_remote and not on_this_machine(to):
        raise ConfigurationError(
            f"{to} is another machine, or not certainly this one: write 127.0.0.1 or localhost, or add "
            "--allow-remote-target"
        )


def _known(app: str, *, needed: bool) -> Mapping[str, Source]:
    """Return the sources of the consumer here. Without `--resign` they only help to name events."""
    try:
        return load_consumer(app).sources
    except ConfigurationError:
        if needed:
            raise
        return {}


async def _follow(wanted: Wanted, settings: Settings, sources: Mapping[str, Source]) -> None:
    async with AsyncExitStack() as stack:
        kept = await stack.enter_async_context(bookmark(settings.home, wanted.url, wanted.sources, wanted.to))
        remote = await stack.enter_async_context(opened(wanted.url))
        local = await stack.enter_async_context(opened(wanted.to))
        after = wanted.after or kept.cursor or "now"
        follower = Follower(
            remote,
            wanted.url,
            wanted.sources,
            after,
            token=wanted.token,
            tell=say,
            most_body_bytes=settings.max_body_bytes,
        )
        signer = Signer(sources, lambda name: signing_secret(sources[name], settings)) if wanted.resign else None
        relay = Relay(local, wanted.to, retries=wanted.retries, tell=say, signer=signer)
        report = Report(say, sources)
        _announce(wanted, after, resumed=wanted.after is None and kept.cursor is not None, kept_at=kept.kept_at)
        for name, reason in _unsigned(wanted, settings, sources):
            say(f"note: {reason}; without one the tunnel ends at the first delivery of {name}")
        if told := await missing(wanted.to, WAITING):
            say(f"note: {told}")
        try:
            await carry(follower, relay, kept, report, wanted.on_error)
        except asyncio.CancelledError:
            if not follower.connections:
                say(f"there was no connection to {wanted.url} until the end")
            raise
        finally:
            if follower.connections:
                again = "started again" + ("" if wanted.after is None else " without --since or --follow-only")
                say(f"{report.summary(follower.connections)}; {again}, it goes on from there")


def _unsigned(wanted: Wanted, settings: Settings, sources: Mapping[str, Source]) -> Iterator[tuple[str, str]]:
    """Yield each source that is to be signed for and cannot be, and why.

    Raises:
        ConfigurationError: one that was named does not exist here.
    """
    for name in (wanted.sources or sources) if wanted.resign else ():
        if name not in sources:
            raise ConfigurationError(f"--resign: there is no source {name!r} here to sign for")
        try:
            signing_secret(sources[name], settings)
        except ConfigurationError as error:
            yield name, str(error)


_START = {"now": "with what comes from now on", "all": "with the oldest that is kept there"}


def _announce(wanted: Wanted, after: str, *, resumed: bool, kept_at: str | None) -> None:
    which = ", ".join(wanted.sources) or "all sources"
    say(f"{which} of {wanted.url} → {wanted.to}/webhooks/{{source}}")
    if resumed:
        say(f"going on where it left off{'' if kept_at is None else f', {kept_at}'}")
    else:
        say(f"starting {_START.get(after, f'from {after}')}")
    if wanted.resign:
        say("signed anew with the secrets known here: what the receiver checks is our signature, not the sender's")
    if wanted.token is not None and urlsplit(wanted.url).scheme == "http" and not on_this_machine(wanted.url):
        say("note: the token and all bodies go unencrypted over the network; use https, or ssh -L")
