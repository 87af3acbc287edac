"""Following a channel of smee.io: server-sent events, one a request that was posted to the channel.

Its stream has `ready` at the start, `ping` every half minute, and messages without a name. Nothing is kept there: what
arrives while nobody follows is lost. Source: probot/smee.io, `lib/server.js` and `lib/keep-alive.js`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import httpx
from httpx_sse import ServerSentEvent, SSEError

from webhooks.db import ended
from webhooks.errors import ConfigurationError, Unreadable, WebhooksError
from webhooks.sources import Source
from webhooks.tunnel.held import Held
from webhooks.tunnel.message import Message, as_sent, read
from webhooks.tunnel.reasons import fault, why
from webhooks.tunnel.relay import Incoming, Relay, Sleep, Tell, taken
from webhooks.tunnel.report import Report
from webhooks.tunnel.session import OnError, Stopped
from webhooks.tunnel.stream import TooLong, Tries, connected, events, packed

# A ping comes every 30 s: after two that did not come the connection is dead, whatever the system believes.
SILENT_S = 75.0
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
GROWTH = 2.0
"""How much longer a body is as a channel writes it: some numbers are written out, and quotes in a text are marked."""
REWRITTEN = (
    "its signature does not fit: a smee channel passes on what it parsed, not the bytes that were signed, and wrote "
    "this body anew (or the hook has another secret than this receiver). --resign signs with the secret known here"
)
UNSIGNED = (
    "whoever posted it to the channel did not sign it, or it is for another source than --source names. --resign signs "
    "with the secret known here"
)


class NotAChannel(WebhooksError):
    """An address does not serve a channel's events; trying again would not help."""


async def follow(
    client: httpx.AsyncClient,
    channel: str,
    tell: Tell,
    sleep: Sleep = asyncio.sleep,
    ready: asyncio.Event | None = None,
    *,
    most_body_bytes: int,
) -> AsyncGenerator[Message]:
    """Yield what is posted to a channel from now on, connecting again as often as it must.

    Args:
        client: whose connections are used.
        channel: its address, such as ``https://smee.io/abcdef``.
        tell: called with what a person should know.
        sleep: how to wait.
        ready: set once what is posted from then on is heard.
        most_body_bytes: the longest body that the receiver here takes.

    Raises:
        NotAChannel: nothing of the kind is there.
        ConfigurationError: it is no address.
    """
    tries, worked = Tries(FIRST_WAIT_S, LONGEST_WAIT_S), False
    while True:
        try:
            async with aclosing(_events(client, channel, tries, most_body_bytes)) as found:
                async for event in found:
                    worked = True
                    if event.event == "ready":
                        tell(f"following {channel}; what is sent there while nobody follows is lost")
                        if ready is not None:
                            ready.set()
                    elif event.event == "message":
                        tries.worked()
                        try:
                            message = read(event.data)
                        except Unreadable as error:
                            tell(f"passed over: {error}")
                            continue
                        yield message
            reason = "it ended the connection"
        except (httpx.RequestError, httpx.StreamError, NotAChannel, TooLong) as error:
            if isinstance(error, NotAChannel) and not worked:
                raise  # once it has worked, whoever answers in between (a proxy, a login page) will go away again
            reason = why(error)
        pause_s = tries.pause_s()
        tell(f"not connected to {channel} ({reason}): trying again in {pause_s:.1f} s")
        await sleep(pause_s)


async def _events(
    client: httpx.AsyncClient, channel: str, tries: Tries, most_body_bytes: int
) -> AsyncGenerator[ServerSentEvent]:
    try:
        async with connected(client, channel, silent_s=SILENT_S) as response:
            status = response.status_code
            if status >= 500 or status == 429:
                raise httpx.RemoteProtocolError(f"it answers {status}")
            if status != 200:
                raise NotAChannel(f"{channel} answers {status}: is it the address of a smee channel?")
            if (how := packed(response)) is not None:
                raise NotAChannel(f"{channel} sends its events packed ({how}), which was not asked for")
            tries.connected()
            async with aclosing(events(response, most_body_bytes, GROWTH)) as found:
                async for event in found:
                    yield event
    except SSEError:
        raise NotAChannel(
            f"{channel} serves no events: give the address of a channel, as smee.io/new made it"
        ) from None
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise ConfigurationError(f"{channel} is no address of a channel: {error}") from None


async def carry(
    messages: AsyncGenerator[Message],
    source: Source,
    secrets: Callable[[], Sequence[str]],
    relay: Relay,
    report: Report,
    on_error: OnError = "stop",
) -> None:
    """Pass on what comes, one after the other, until cancelled.

    While the local receiver is away what comes is held here, since the channel holds nothing.

    Args:
        messages: from `follow`.
        source: whose deliveries they are.
        secrets: returns those known here by now, to find the bytes that were signed.
        relay: where they go.
        report: who is told.
        on_error: what to do when the local receiver finally refuses one.

    Raises:
        Stopped: it refused one.
        NotAChannel: the channel is none.
    """
    held = Held(report.tell)

    async def listen() -> None:
        try:
            async with aclosing(messages):
                async for message in messages:
                    await held.put(message)
        finally:
            held.end()

    listening = asyncio.create_task(listen(), name="smee channel")
    try:
        while (message := await held.next()) is not None:
            await _pass(message, source, secrets(), relay, report, on_error)
        await listening
    finally:
        await ended([listening])


async def _pass(
    message: Message, source: Source, secrets: Sequence[str], relay: Relay, report: Report, on_error: OnError
) -> None:
    sent = as_sent(source, message, secrets, time.time())
    if sent is not None and sent.rewritten:
        report.tell("the channel had written the next body anew; the bytes that its signature fits were found again")
    body = message.writings[0] if sent is None else sent.body
    incoming = Incoming(source=source.name, headers=source.keep(message.headers), body=body)
    answer = await relay.post(incoming)
    if taken(answer):
        report.passed(incoming, answer)
        return
    hints = {"bad_signature": REWRITTEN, "missing_signature": UNSIGNED}
    hint = hints.get(answer.cause or "") if relay.signer is None and sent is None else None
    advice = [] if hint is None else [hint]
    # Anybody may write to a channel: what nobody signed is no delivery, and does not end the tunnel for the others.
    if on_error == "stop" and answer.cause != "missing_signature":
        refused = f"stopped at a delivery of {source.name}: {relay.base} refused it ({fault(answer)})"
        raise Stopped(refused, *advice, "to leave out what is refused: --on-error skip")
    report.skipped(incoming, answer)
    for line in advice:
        report.tell(f"  {line}")
