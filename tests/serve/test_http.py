"""What a connection may cost, and what belongs to which request, over real sockets."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from consumers import Request, Stack, from_shortcut, served, stack, stories
from gates import until

from webhooks import Consumer, GitHub, Shortcut
from webhooks.serve.http import BoundedProtocol, Connections, Limits

GET = b"GET /healthz HTTP/1.1\r\nHost: test\r\n\r\n"
# What Java's HttpClient offers with every request over plain HTTP, when it may speak HTTP/2.
JAVA = [
    ("Connection", "Upgrade, HTTP2-Settings"),
    ("HTTP2-Settings", "AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA"),
    ("Upgrade", "h2c"),
    ("User-Agent", "Java-http-client/21.0.2"),
]
PROXY = [("Connection", "upgrade"), ("Upgrade", "websocket")]


@pytest.fixture
async def here(database_url: str) -> AsyncIterator[Stack]:
    consumer = Consumer(gates=[], sources=[Shortcut(), GitHub()])
    async with stack(database_url, consumer, work=False, most_bytes=1 << 20) as running:
        yield running


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[BoundedProtocol]:
    """Every connection that a server of this test was asked for, in order."""
    made: list[BoundedProtocol] = []
    protocol = Connections.protocol

    def noted(self: Connections, **arguments: Any) -> BoundedProtocol:
        made.append(protocol(self, **arguments))
        return made[-1]

    monkeypatch.setattr(Connections, "protocol", noted)
    return made


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def sends(self, *parts: bytes) -> None:
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()
            await asyncio.sleep(0.01)  # so that each comes in a segment of its own

    async def hears(self) -> tuple[int, Any]:
        """Read one answer."""
        async with asyncio.timeout(10):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            body = await self.reader.readexactly(length)
        return int(head.split(b" ")[1]), json.loads(body) if body.startswith(b"{") else body

    async def hears_the_end(self) -> bytes:
        async with asyncio.timeout(10):
            with suppress(ConnectionError):
                return await self.reader.read()
        return b""


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()


def offering(request: Request, lines: list[tuple[str, str]]) -> bytes:
    return Request(request.path, [*lines, *request.headers], request.body).raw()


def in_chunks(request: Request, lines: list[tuple[str, str]], trailers: bytes = b"") -> bytes:
    head = [f"POST {request.path} HTTP/1.1", "Host: test", "Transfer-Encoding: chunked"]
    head += [f"{name}: {value}" for name, value in [*lines, *request.headers]]
    body = request.body
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:7], body[7:]))
    return "\r\n".join(head).encode() + b"\r\n\r\n" + chunks + b"0\r\n" + trailers + b"\r\n"


# Requests that are sent ahead of their answers


async def test_requests_sent_ahead_on_a_connection_that_reads_nothing_are_not_read_either(
    here: Stack, connections: list[BoundedProtocol]
) -> None:
    async with served(here.receiver) as port, connected(port) as deaf, connected(port) as honest:
        sent = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(3):
                while sent < 50 << 20:
                    deaf.writer.write(GET * 1000)
                    await deaf.writer.drain()
                    sent += 1000 * len(GET)
        assert sent < 16 << 20  # what the kernel and one read hold
        assert len(connections[0].pipeline) < 64
        await honest.sends(from_shortcut(stories(1)).raw())
        assert (await honest.hears())[0] == 202
        all_of_them = connections[0]._all
        deaf.writer.transport.abort()
        await honest.sends(GET)
        await honest.hears()
        assert all_of_them.waiting == 0
        assert all_of_them.count == 1


async def test_a_thousand_signed_requests_sent_ahead_are_all_served(here: Stack) -> None:
    async with served(here.receiver) as port, connected(port) as ahead:
        sending = asyncio.create_task(ahead.sends(b"".join(from_shortcut(stories(n)).raw() for n in range(1000))))
        answers = [await ahead.hears() for _ in range(1000)]
        await sending
    assert [status for status, _ in answers] == [202] * 1000
    # In the order in which they were asked: that is how a sender knows which answer is whose.
    ids = [answer["delivery"] for _, answer in answers]
    assert ids == sorted(ids)


async def test_what_all_connections_sent_ahead_is_bounded(here: Stack) -> None:
    async with served(here.receiver, Limits(waiting_bytes=100_000)) as port:
        async with connected(port) as greedy:
            with suppress(ConnectionError):
                await greedy.sends(*(GET * 20_000 for _ in range(20)))
            answers = await greedy.hears_the_end()
            assert answers.count(b"HTTP/1.1 200") < 20_000 * 20
        async with connected(port) as honest:
            await honest.sends(from_shortcut(stories(1)).raw())
            assert (await honest.hears())[0] == 202


async def test_who_takes_no_answer_is_closed(connections: list[BoundedProtocol]) -> None:
    long = b"x" * (1 << 20)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        length = (b"content-length", str(len(long)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": long})

    async with served(app, Limits(untaken_s=0.1)) as port, connected(port) as deaf:
        await deaf.sends(GET * 40)
        await until(lambda: not connections[0].counted)
        assert connections[0]._all.count == 0


# Offers of another protocol


@pytest.mark.parametrize("offer", [JAVA, PROXY], ids=["h2c", "websocket"])
@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("segments", [1, 2, 3])
async def test_an_offer_of_another_protocol_is_ignored_and_the_body_is_the_requests_own(
    here: Stack, offer: list[tuple[str, str]], framing: str, segments: int
) -> None:
    first, second = from_shortcut(stories(1)), from_shortcut(stories(2))
    raw = offering(first, offer) if framing == "length" else in_chunks(first, offer)
    head = raw.index(b"\r\n\r\n") + 4
    cuts = {1: [raw], 2: [raw[:head], raw[head:]], 3: [raw[:40], raw[40 : head + 3], raw[head + 3 :]]}[segments]
    async with served(here.receiver) as port, connected(port) as client:
        await client.sends(*cuts)
        assert (await client.hears())[0] == 202
        await client.sends(second.raw())
        assert (await client.hears())[0] == 202
    assert [row["body"] for row in await here.deliveries()] == [first.body, second.body]


@pytest.mark.parametrize("together", [True, False])
async def test_an_unsigned_offer_swallows_nothing_of_the_next_request(here: Stack, together: bool) -> None:
    """A proxy that reuses its connections sends one stranger's request and the next sender's one after the other."""
    strange = Request("/webhooks/shortcut", JAVA, b"POST /webhooks/shortcut HTTP/1.1\r\nContent-Length: 5000\r\n\r\n")
    honest = from_shortcut(stories(1))
    async with served(here.receiver) as port, connected(port) as client:
        await client.sends(*([strange.raw() + honest.raw()] if together else [strange.raw(), honest.raw()]))
        assert [(await client.hears())[0] for _ in range(2)] == [401, 202]
    assert [row["body"] for row in await here.deliveries()] == [honest.body]


async def test_nothing_is_connected_through_us(here: Stack) -> None:
    async with served(here.receiver) as port, connected(port) as client:
        await client.sends(b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\n\r\n" + GET)
        answer = await client.hears_the_end()
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1") == 1


async def test_the_preface_of_http_2_is_refused(here: Stack) -> None:
    async with served(here.receiver) as port, connected(port) as client:
        await client.sends(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 100)
        assert (await client.hears_the_end()).startswith(b"HTTP/1.1 400")


# What belongs to a request, and what does not


async def test_a_trailer_belongs_to_no_head(here: Stack) -> None:
    """A signature that comes after the body is none, and a header that comes there replaces none."""
    signed = from_shortcut(stories(1))
    unsigned = Request(signed.path, [], signed.body)
    [signature] = [f"{name}: {value}\r\n".encode() for name, value in signed.headers if "ignature" in name]
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        await asyncio.sleep(0.02)
        seen.append([name for name, _ in scope["headers"]])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async with served(here.receiver) as port, connected(port) as client:
        await client.sends(in_chunks(unsigned, [], signature), signed.raw())
        assert [(await client.hears())[0] for _ in range(2)] == [401, 202]
    async with served(app) as port, connected(port) as client:
        await client.sends(in_chunks(unsigned, [], signature))
        assert (await client.hears())[0] == 200
    assert seen == [[b"host", b"transfer-encoding"]]


async def test_what_follows_a_request_that_closes_its_connection_is_not_read(here: Stack) -> None:
    last = from_shortcut(stories(1))
    closing = Request(last.path, [("Connection", "close"), *last.headers], last.body)
    async with served(here.receiver) as port, connected(port) as client:
        await client.sends(closing.raw() + from_shortcut(stories(2)).raw())
        assert (await client.hears_the_end()).count(b"HTTP/1.1") == 1
    assert len(await here.deliveries()) == 1


async def test_blanks_after_a_headers_value_are_no_part_of_it(here: Stack) -> None:
    request = from_shortcut(stories(1))
    padded = Request(request.path, [(name, f"{value} \t ") for name, value in request.headers], request.body)
    async with served(here.receiver) as port, connected(port) as client:
        await client.sends(padded.raw())
        assert (await client.hears())[0] == 202


# A sender that closes its own side


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("ahead", [1, 3])
async def test_a_sender_that_closes_its_own_side_is_answered(here: Stack, framing: str, ahead: int) -> None:
    requests = [from_shortcut(stories(n)) for n in range(ahead)]
    raw = [request.raw() if framing == "length" else in_chunks(request, []) for request in requests]
    async with served(here.receiver) as port, connected(port) as client:
        client.writer.write(b"".join(raw))
        client.writer.write_eof()
        assert [(await client.hears())[0] for _ in range(ahead)] == [202] * ahead
        assert await client.hears_the_end() == b""
    assert len(await here.deliveries()) == ahead


@pytest.mark.parametrize("cut", [40, -5])
async def test_a_sender_that_closes_in_the_middle_of_a_request_leaves_nothing(
    here: Stack, cut: int, connections: list[BoundedProtocol]
) -> None:
    async with served(here.receiver) as port, connected(port) as client:
        client.writer.write(from_shortcut(stories(1)).raw()[:cut])
        client.writer.write_eof()
        assert await client.hears_the_end() == b""
    assert await here.deliveries() == []
    assert connections[0]._all.count == 0


# Silence, and too many


@pytest.mark.parametrize(
    "sent",
    [b"", b"\r\n", b"P", b"POST /webhooks/shortcut HTTP/1.1\r\nHost: te"],
    ids=["nothing", "a blank line", "one byte", "half a head"],
)
async def test_a_connection_whose_head_does_not_come_is_closed(here: Stack, sent: bytes) -> None:
    async with served(here.receiver, Limits(first_byte_s=0.2, head_s=0.2)) as port, connected(port) as client:
        await client.sends(sent)
        assert await client.hears_the_end() == b""


async def test_a_head_that_trickles_in_is_closed_in_time_all_the_same(here: Stack) -> None:
    async with served(here.receiver, Limits(head_s=0.3)) as port, connected(port) as client:
        head = from_shortcut(stories(1)).raw()
        ended = asyncio.create_task(client.hears_the_end())
        sent = 0
        for sent in range(len(head)):
            if ended.done():
                break
            with suppress(ConnectionError):
                await client.sends(head[sent : sent + 1])
        assert ended.done()
        assert sent < len(head) - 1
        assert await ended == b""


async def test_the_rest_of_a_body_that_was_answered_is_not_waited_for_long(here: Stack) -> None:
    async with served(here.receiver, Limits(rest_s=0.2)) as port, connected(port) as client:
        await client.sends(b"POST /nowhere HTTP/1.1\r\nHost: test\r\nContent-Length: 100\r\n\r\nten bytes!")
        assert (await client.hears())[0] == 404
        assert await client.hears_the_end() == b""


async def test_a_connection_rests_between_requests_as_long_as_it_may(here: Stack) -> None:
    async with served(here.receiver, Limits(first_byte_s=0.2, keep_alive_s=0.5)) as port, connected(port) as client:
        for number in range(3):
            await client.sends(from_shortcut(stories(number)).raw())
            assert (await client.hears())[0] == 202
            await asyncio.sleep(0.3)
        assert await client.hears_the_end() == b""


async def test_past_the_bound_the_oldest_go_that_are_not_in_the_middle_of_a_delivery(here: Stack) -> None:
    request = from_shortcut(stories(1))
    async with served(here.receiver, Limits(connections=10)) as port, connected(port) as sender:
        await sender.sends(request.raw()[:-5])
        others = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
        for number, (_, writer) in enumerate(others):
            writer.write(b"POST"[: number % 4])
        async with connected(port) as honest:
            await honest.sends(from_shortcut(stories(2)).raw())
            assert (await honest.hears())[0] == 202
            async with asyncio.timeout(10):
                for reader, _ in others[:30]:
                    with suppress(ConnectionError):
                        assert await reader.read() == b""
        assert not others[-1][0].at_eof()
        # The oldest of all is in the middle of its delivery.
        await sender.sends(request.raw()[-5:])
        assert (await sender.hears())[0] == 202
        for _, writer in others:
            writer.transport.abort()


async def test_bodies_that_do_not_come_do_not_shut_the_door(here: Stack) -> None:
    async with served(here.receiver, Limits(connections=10)) as port:
        slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(30)]
        for number, (_, writer) in enumerate(slow):
            writer.write(from_shortcut(stories(number)).raw()[:-5])
        async with connected(port) as honest:
            await honest.sends(from_shortcut(stories(99)).raw())
            assert (await honest.hears())[0] == 202
        for _, writer in slow:
            writer.transport.abort()
    assert len(await here.deliveries()) == 1


# Files

FEW_FILES = """
import asyncio, os, resource, sys
from webhooks.observe import configure_logging
from webhooks.serve import http

async def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (20, 1000))
    room = http.raise_file_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1000
    print("room", room, flush=True)
    configure_logging(json=True)
    telling = asyncio.create_task(http.tell_of_full_files())
    taken = []
    try:
        while True:
            taken.append(os.dup(0))
    except OSError:
        await asyncio.sleep(2.5)
    telling.cancel()

asyncio.run(main())
"""


async def test_the_limit_of_files_is_raised_and_one_that_is_reached_is_told_once() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FEW_FILES, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, told = await asyncio.wait_for(process.communicate(), 60)
    assert out.split() == [b"room", b"488"]
    assert told.count(b"new connections cannot be accepted") == 1
