"""Following a channel of smee.io: its stream as its server writes it, and the bytes that were signed."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl, quote_plus

import httpx
import pytest
import respx
from channels import READY, Server, event, told, written
from consumers import SECRET, digest, from_github, from_shortcut, served, stack, stories
from gates import until

from webhooks import Consumer, GitHub, Shortcut, StandardWebhooks
from webhooks.errors import ConfigurationError, Unreadable
from webhooks.sending import opened
from webhooks.signatures import sign
from webhooks.tunnel.held import MOST_BYTES, Held
from webhooks.tunnel.message import Message, as_sent, read
from webhooks.tunnel.relay import Relay, Signer
from webhooks.tunnel.report import Report
from webhooks.tunnel.session import OnError, Stopped
from webhooks.tunnel.smee import REWRITTEN, UNSIGNED, NotAChannel, carry, follow

CHANNEL = "https://smee.example/channel"
PING = b"id: 3\nevent: ping\ndata: {}\n\n"
GITHUB, SHORTCUT = GitHub(), Shortcut()
MOST_BODY_BYTES = 3 << 20

# What the channel says


def test_headers_and_body_are_what_the_channel_wrote() -> None:
    body = '{"b":1,"a":{"body":"\\"}","c":[1,2]},"n":12345678901234567000,"e":"é😊"}'
    message = read(told([("X-GitHub-Event", "push"), ("Set-Cookie", "a")], body, also=["x", "y"]))
    assert message.writings[0] == body.encode()
    assert ("x-github-event", "push") in message.headers
    assert ("also", "x") in message.headers
    assert ("also", "y") in message.headers
    assert not {"body", "query", "timestamp"} & {name for name, _ in message.headers}


@pytest.mark.parametrize(
    "data",
    [
        "",
        "{}",
        "[]",
        "null",
        "{",
        '{"body"',
        '{"body":1',
        '{"body" 1}',
        "{1:2}",
        '{"query":{}}',
        "[" * 100_000,
        '{"body":' + "[" * 100_000,
        '"x"',
        '{"rawdata":5}',
        '{"content-type":"application/x-www-form-urlencoded","body":{"payload":"\\ud800"}}',
    ],
    ids=lambda data: data[:20],
)
def test_what_is_no_request_is_unreadable(data: str) -> None:
    with pytest.raises(Unreadable):
        read(data)


@pytest.mark.parametrize("name", ["rawdata", "rawbody"])
def test_the_bytes_themselves_are_taken_where_a_channel_passes_them_on(name: str) -> None:
    sent = '{\n   "a": 2,\n  "id": 12345678901234567890, "f": 1.0, "e": "\\u00e9", "a": 3\n}'
    request = from_github(sent.encode())
    message = read(told(request.headers, '{"a":3,"id":12345678901234567000,"f":1,"e":"é"}', **{name: sent}))
    found = as_sent(GITHUB, message, [SECRET], 0)
    assert found is not None
    assert found.body == sent.encode()


# The bytes that were signed

STORY = {"id": "5f0c", "actions": [{"id": 7, "app_url": "https://app.shortcut.com/x/story/7", "name": "café 😊 <b>"}]}


@pytest.mark.parametrize(
    "sent",
    [
        written(STORY),
        json.dumps(STORY),
        json.dumps(STORY, separators=(",", ":")),
        json.dumps(STORY, indent=2, ensure_ascii=False),
        written(STORY).replace("/", "\\/"),
        json.dumps(STORY, separators=(",", ":")).replace("/", "\\/"),
    ],
    ids=["as JavaScript", "as Python", "ASCII", "indented", "slashes escaped", "ASCII and slashes escaped"],
)
def test_bytes_that_the_channel_wrote_anew_are_found_again_by_their_signature(sent: str) -> None:
    request = from_shortcut(sent.encode())
    message = read(told(request.headers, written(json.loads(sent))))
    found = as_sent(SHORTCUT, message, [SECRET], 0)
    assert found is not None
    assert found.body == sent.encode()
    assert found.rewritten == (sent != written(STORY))
    assert as_sent(SHORTCUT, message, ["another secret"], 0) is None


def test_bytes_that_lost_something_on_the_way_cannot_be_found() -> None:
    sent = '{\n   "a": 2,\n  "id": 12345678901234567890, "f": 1.0, "e": "\\u00e9", "a": 3\n}'
    request = from_github(sent.encode())
    assert as_sent(GITHUB, read(told(request.headers, '{"a":3,"id":12345678901234567000}')), [SECRET], 0) is None


def test_a_form_is_a_form_again() -> None:
    sent = b"payload=" + quote_plus('{"action":"opened","title":"a b+c & d"}').encode() + b"&other=1"
    kind = "application/x-www-form-urlencoded"
    request = from_github(sent, event="issues", content_type=kind)
    message = read(told(request.headers, written(dict(parse_qsl(sent.decode())))))
    found = as_sent(GITHUB, message, [SECRET], 0)
    assert found is not None
    assert found.body == sent
    assert ("content-type", kind) in GITHUB.keep(message.headers)


def test_an_old_signed_time_does_not_hide_that_the_signature_fits() -> None:
    acme, secret = StandardWebhooks("acme"), "whsec_" + "A" * 43 + "="
    sent = b'{"type": "x"}'
    message = read(told(sign(acme.recipe, sent, secret, now=1000, id="a"), '{"type":"x"}'))
    found = as_sent(acme, message, [secret], 10_000)
    assert found is not None
    assert found.body == sent


def test_only_the_headers_that_belong_to_the_delivery_go_on() -> None:
    request = from_github(b"{}")
    kept = GITHUB.keep(read(told([*request.headers, ("Authorization", "x"), ("Cookie", "y")], "{}")).headers)
    assert {name for name, _ in kept} == {name.lower() for name, _ in request.headers}


# The stream


class Chunks(httpx.AsyncByteStream):
    def __init__(self, chunks: Iterable[bytes]) -> None:
        self.chunks = chunks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self.chunks:
            if chunk:
                yield chunk


class Channel(httpx.AsyncBaseTransport):
    """A channel whose connections are these, one after the other; past them the test has what it wants."""

    def __init__(self, *connections: Iterable[bytes] | httpx.Response | Exception) -> None:
        self.connections = list(connections)
        self.requests: list[httpx.Request] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if not self.connections:
            await asyncio.Event().wait()
        found = self.connections.pop(0)
        if isinstance(found, Exception):
            raise found
        if isinstance(found, httpx.Response):
            return found
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Chunks(found))


async def heard(channel: Channel, count: int, lines: list[str] | None = None) -> list[bytes]:
    """The bodies of the first messages of a channel."""
    waits: list[float] = []

    async def wait(seconds: float) -> None:
        waits.append(seconds)

    found: list[bytes] = []
    async with httpx.AsyncClient(transport=channel) as client, asyncio.timeout(20):
        messages = follow(
            client, CHANNEL, ([] if lines is None else lines).append, wait, most_body_bytes=MOST_BODY_BYTES
        )
        while len(found) < count:
            found.append((await anext(messages)).writings[0])
        await messages.aclose()
    assert all(0 < seconds <= 30 for seconds in waits)
    return found


# \u2028 and \x85 are line ends elsewhere, and stand as they are in what JavaScript writes.
HARD = written({"title": "😊 é \u2028 \x85 \x0b", "next": "line\nline\r"})


async def test_events_come_whole_wherever_the_stream_is_cut() -> None:
    stream = READY + event(told([], HARD), 1) + PING + event(told([], '{"n":"é"}'), 2)
    for at in range(len(stream)):
        assert await heard(Channel([stream[:at], stream[at:]]), 2) == [HARD.encode(), '{"n":"é"}'.encode()]
    assert len(await heard(Channel([bytes([byte]) for byte in stream]), 2)) == 2


@pytest.mark.parametrize("end", ["\r\n", "\r"])
async def test_other_line_ends_are_line_ends_too(end: str) -> None:
    stream = (READY + event(told([], HARD))).replace(b"\n", end.encode()) + READY
    for at in range(len(stream)):
        assert await heard(Channel([stream[:at], stream[at:]]), 1) == [HARD.encode()]


async def test_an_event_that_is_cut_off_by_the_end_of_the_connection_is_none() -> None:
    whole = event(told([], HARD))
    for at in range(1, len(whole) - 1):
        assert await heard(Channel([READY, whole[:at]], [READY, event(told([], "{}"))]), 1) == [b"{}"]


async def test_a_connection_that_ends_or_breaks_is_made_again_and_that_is_said() -> None:
    lines: list[str] = []
    channel = Channel(
        [READY, event(told([], '{"n":1}'))],
        httpx.ReadTimeout("silent"),
        httpx.Response(502),
        [PING, b"data: no request\n\n", event(told([], '{"n":2}'))],
    )
    assert await heard(channel, 2, lines) == [b'{"n":1}', b'{"n":2}']
    assert [request.headers["accept"] for request in channel.requests] == ["text/event-stream"] * 4
    said = "\n".join(lines)
    assert "what is sent there while nobody follows is lost" in said
    for reason in ("it ended the connection", "silent", "502", "passed over"):
        assert reason in said


@pytest.mark.parametrize(
    "answer",
    [httpx.Response(404), httpx.Response(200, text="<html>"), httpx.Response(302, headers={"location": "/"})],
    ids=["404", "a page", "a redirect"],
)
async def test_an_address_that_is_no_channel_is_said_to_be_none(answer: httpx.Response) -> None:
    with pytest.raises(NotAChannel):
        await heard(Channel(answer), 1)


async def test_an_event_without_end_is_broken_off_and_the_channel_is_followed_on() -> None:
    read = 0

    def endless() -> Iterator[bytes]:
        nonlocal read
        yield READY
        while read < 64 << 20:
            read += 1 << 16
            yield b"data" * (1 << 14)

    lines: list[str] = []
    assert await heard(Channel(endless(), [event(told([], "{}"))]), 1, lines) == [b"{}"]
    assert read <= 8 << 20
    assert any("more than 7 MiB" in line and "WEBHOOKS_MAX_BODY_MIB" in line for line in lines)


async def test_what_is_packed_was_not_asked_for_and_is_not_unpacked() -> None:
    lines = {"content-type": "text/event-stream", "content-encoding": "gzip"}
    channel = Channel(httpx.Response(200, headers=lines, stream=Chunks([gzip.compress(READY)])))
    with pytest.raises(NotAChannel, match=r"packed \(gzip\)"):
        await heard(channel, 1)
    assert channel.requests[0].headers["accept-encoding"] == "identity"


async def test_a_stream_is_utf_8_whatever_it_says_of_itself() -> None:
    lines = {"content-type": "text/event-stream; charset=utf-16"}
    answer = httpx.Response(200, headers=lines, stream=Chunks([event(told([], HARD))]))
    assert await heard(Channel(answer), 1) == [HARD.encode()]


async def test_a_connection_that_brings_no_message_is_made_again_later_and_later() -> None:
    waits: list[float] = []

    async def wait(seconds: float) -> None:
        waits.append(seconds)

    message = event(told([], "{}"))
    channel = Channel(*[[READY]] * 8, [READY, message], [READY, message])
    async with httpx.AsyncClient(transport=channel) as client, asyncio.timeout(20):
        messages = follow(client, CHANNEL, print, wait, most_body_bytes=MOST_BODY_BYTES)
        for _ in range(2):
            await anext(messages)
        await messages.aclose()
    assert len(waits) == 9
    assert waits[6] >= 15, "half of the longest, at least"
    assert waits[8] <= 1, "the one before brought something"


async def test_whoever_answers_in_between_is_waited_out() -> None:
    login = httpx.Response(200, text="<html>who are you?</html>", headers={"content-type": "text/html"})
    assert await heard(Channel([READY], login, [event(told([], "{}"))]), 1) == [b"{}"]


async def test_what_is_no_address_is_said_to_be_none() -> None:
    async with httpx.AsyncClient() as client:
        with pytest.raises(ConfigurationError):
            await anext(follow(client, "smee.io/channel", print, most_body_bytes=1))


# To the local receiver


class Tunnel:
    """A running tunnel from a channel of a server to a receiver."""

    def __init__(self, parts: Any, channel: str, lines: list[str], carrying: asyncio.Task[None]) -> None:
        self.parts, self.channel, self.lines, self.carrying = parts, channel, lines, carrying

    async def post(self, request: Any) -> None:
        async with httpx.AsyncClient() as client:
            await client.post(self.channel, content=request.body, headers=request.headers)

    async def stored(self, count: int) -> list[dict[str, Any]]:
        async with asyncio.timeout(20):
            while len(rows := await self.parts.deliveries()) < count:
                assert not self.carrying.done(), await asyncio.gather(self.carrying, return_exceptions=True)
                await asyncio.sleep(0.02)
        return list(rows)


@asynccontextmanager
async def tunnel(
    database_url: str, source: Any, *, secret: str = SECRET, resign: bool = False, on_error: OnError = "stop"
) -> AsyncIterator[Tunnel]:
    consumer = Consumer(gates=[], sources=[Shortcut(), GitHub()])
    lines: list[str] = []
    server = Server()
    async with AsyncExitStack() as exits:
        local_secrets = dict.fromkeys(consumer.sources, (secret,))
        parts = await exits.enter_async_context(stack(database_url, consumer, work=False, secrets=local_secrets))
        port = await exits.enter_async_context(served(parts.receiver))
        channel = f"http://127.0.0.1:{await exits.enter_async_context(served(server))}/channel"
        base = f"http://127.0.0.1:{port}"
        local = await exits.enter_async_context(opened(base))
        remote = await exits.enter_async_context(httpx.AsyncClient())
        signer = Signer(consumer.sources, lambda _: secret) if resign else None
        relay = Relay(local, base, retries=0, tell=lines.append, signer=signer)
        report = Report(lines.append, consumer.sources)
        messages = follow(remote, channel, lines.append, most_body_bytes=MOST_BODY_BYTES)
        carrying = asyncio.create_task(carry(messages, source, lambda: [secret], relay, report, on_error))
        await until(lambda: server.followers, within_s=20)
        try:
            yield Tunnel(parts, channel, lines, carrying)
        finally:
            carrying.cancel()
            await asyncio.gather(carrying, return_exceptions=True)


@pytest.mark.invariant(12)
async def test_what_is_posted_to_a_channel_arrives_as_it_was_sent(database_url: str) -> None:
    kind = "application/x-www-form-urlencoded"
    form = b"payload=" + quote_plus('{"action":"opened"}').encode()
    async with tunnel(database_url, GITHUB) as running:
        requests = [from_github(json.dumps({"n": number, "e": "é/"}).encode()) for number in range(5)]
        requests.append(from_github(form, event="issues", content_type=kind))
        for request in requests:
            await running.post(request)
        rows = await running.stored(len(requests))
        assert [bytes(row["body"]) for row in rows] == [request.body for request in requests]
        assert ["content-type", kind] in rows[-1]["headers"]
        assert any("found again" in line for line in running.lines)
        await until(lambda: sum("→ 202 accepted" in line for line in running.lines) == len(requests))


@respx.mock
async def test_what_the_channel_tells_of_the_connection_or_of_a_person_goes_no_further() -> None:
    local = respx.post("http://127.0.0.1:9/webhooks/github").respond(202, json={"status": "accepted"})
    request = from_github(b"{}")

    async def messages() -> AsyncGenerator[Message]:
        yield read(told([*request.headers, ("Authorization", "Bearer x"), ("Cookie", "y"), ("X-Real-Ip", "z")], "{}"))

    async with httpx.AsyncClient() as client:
        relay = Relay(client, "http://127.0.0.1:9", retries=0, tell=print)
        await carry(messages(), GITHUB, lambda: [SECRET], relay, Report(print, {}))
    sent = {name.lower() for name, _ in local.calls.last.request.headers.raw}
    assert sent == {name.lower().encode() for name, _ in request.headers} | {b"host", b"content-length"}


@respx.mock
async def test_while_the_receiver_is_away_no_more_is_held_than_there_is_room_for_and_that_is_said_once() -> None:
    away = [httpx.ConnectError("away")]
    taken = [httpx.Response(202, json={"status": "accepted"})] * 100
    local = respx.post("http://127.0.0.1:9/webhooks/github").mock(side_effect=[*away, *taken])
    lines, back, read = list[str](), asyncio.Event(), 0

    async def messages() -> AsyncGenerator[Message]:
        nonlocal read
        for number in range(100):
            read += 1
            yield Message((), (bytes([number]) * (1 << 20),))

    async def wait(seconds: float) -> None:
        await back.wait()

    async with httpx.AsyncClient() as client:
        relay = Relay(client, "http://127.0.0.1:9", retries=0, tell=lines.append, sleep=wait)
        carrying = asyncio.create_task(carry(messages(), GITHUB, list, relay, Report(lines.append, {})))
        await until(lambda: any("room for no more" in line for line in lines))
        assert (MOST_BYTES >> 20) - 1 <= read <= (MOST_BYTES >> 20) + 2
        back.set()
        await asyncio.wait_for(carrying, 20)
    assert [call.request.content[:1] for call in local.calls[1:]] == [bytes([number]) for number in range(100)]
    assert sum("room for no more" in line for line in lines) == 1


async def test_many_short_lines_take_room_too_and_what_is_larger_than_all_room_is_held_alone() -> None:
    lines: list[str] = []
    held = Held(lines.append, most_bytes=100_000)
    many = Message(tuple((f"a{number}", "b") for number in range(600)), (b"",))
    await held.put(many)
    second = asyncio.create_task(held.put(many))
    await until(lambda: len(lines) == 1)
    assert not second.done()
    assert await held.next() is many
    await second
    assert await held.next() is many
    await held.put(Message((), (bytes(200_000),)))
    held.end()
    assert (await held.next()) is not None
    assert await held.next() is None


LOSSY = '{\n   "a": 2,\n  "id": 12345678901234567890, "a": 3\n}'


async def test_that_the_channel_wrote_a_body_anew_is_said_when_the_signature_fails(database_url: str) -> None:
    async with tunnel(database_url, GITHUB) as running:
        await running.post(from_github(LOSSY.encode()))
        with pytest.raises(Stopped, match="401: bad_signature") as stopped:
            await asyncio.wait_for(running.carrying, 20)
        assert stopped.value.__notes__ == [REWRITTEN, "to leave out what is refused: --on-error skip"]
        assert await running.parts.deliveries() == []


async def test_what_nobody_signed_does_not_end_the_tunnel_for_what_is(database_url: str) -> None:
    """Anybody may write to a channel."""
    async with tunnel(database_url, GITHUB) as running:
        signed = from_github(b"{}")
        await running.post(replace(signed, headers=[line for line in signed.headers if "Signature" not in line[0]]))
        await running.post(signed)
        assert len(await running.stored(1)) == 1
        assert any("missing_signature" in line for line in running.lines)
        assert f"  {UNSIGNED}" in running.lines


async def test_refused_ones_are_left_out_where_that_is_asked_for(database_url: str) -> None:
    async with tunnel(database_url, GITHUB, on_error="skip") as running:
        await running.post(from_github(LOSSY.encode()))
        await running.post(from_github(b"{}"))
        assert len(await running.stored(1)) == 1
        assert any("wrote this body anew" in line for line in running.lines)


async def test_signed_anew_it_is_taken_though_the_channel_wrote_it_anew(database_url: str) -> None:
    async with tunnel(database_url, GITHUB, secret="a local secret", resign=True) as running:
        await running.post(from_github(LOSSY.encode(), guid="one"))
        [row] = await running.stored(1)
        assert json.loads(bytes(row["body"])) == json.loads(LOSSY)
        assert row["dedup_key"] == "101:one"
        signature = dict(row["headers"])["x-hub-signature-256"]
        assert signature == f"sha256={digest(bytes(row['body']), 'a local secret')}"


async def test_a_copy_that_comes_twice_is_stored_once(database_url: str) -> None:
    async with tunnel(database_url, SHORTCUT) as running:
        request = from_shortcut(stories(7, id="same"))
        for _ in range(3):
            await running.post(request)
        await running.post(from_shortcut(stories(8)))
        assert len(await running.stored(2)) == 2
        assert sum("→ 200 duplicate" in line for line in running.lines) == 2
