"""Sending a delivery as it came, and what each answer means."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx
import pytest
import respx
from consumers import SECRET, from_github, served
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from webhooks import GitHub, Shortcut, StandardWebhooks, sending
from webhooks.errors import ConfigurationError
from webhooks.sending import Outcome, on_this_machine, opened, read_retry_after, resigned, send, target
from webhooks.signatures import new_secret

BASE = "http://receiver.test"


@pytest.mark.parametrize(
    ("base", "url"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/webhooks/github"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000/webhooks/github"),
        ("https://hooks.example.com/behind/a/proxy", "https://hooks.example.com/behind/a/proxy/webhooks/github"),
        ("http://[::1]:8000", "http://[::1]:8000/webhooks/github"),
        ("https://user:word@example.com", "https://user:word@example.com/webhooks/github"),
    ],
)
def test_the_path_of_a_source_is_added_to_a_base_address(base: str, url: str) -> None:
    assert target(base, "github") == url


@pytest.mark.parametrize(
    "base",
    ["127.0.0.1:8000", "ftp://example.com", "http://", "http://h:0", "http://h:x", "http://h?a=1", "http://h/#a", ""],
)
def test_what_is_no_base_address_is_refused(base: str) -> None:
    with pytest.raises(ConfigurationError):
        target(base, "github")


def test_an_address_that_has_the_path_already_is_refused_rather_than_given_it_twice() -> None:
    with pytest.raises(ConfigurationError, match="leave out what follows the host"):
        target("http://127.0.0.1:8000/webhooks/github", "github")


@pytest.mark.parametrize(
    "name", ["..", ".", "", "../admin", "a/b", "%2e%2e", "a?b", "a#b", "a b", "é", "x" * 200, "a\n"]
)
async def test_what_is_no_name_of_a_source_leads_nowhere(name: str) -> None:
    """A client would read `..` as a step up, and post to another path."""
    with pytest.raises(ConfigurationError, match="no name of a source"):
        target(BASE, name)
    async with opened(BASE) as client:
        with pytest.raises(ConfigurationError, match="no name of a source"):
            await send(client, BASE, name, (), b"{}")


@pytest.mark.parametrize(
    ("base", "here"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://127.9.9.9", True),
        ("http://[::1]:1", True),
        ("http://localhost:3100", True),
        ("http://dev.localhost", True),
        ("http://10.0.0.1", False),
        ("https://localhost.example.com", False),
    ],
)
def test_this_machine_is_told_from_others(base: str, here: bool) -> None:
    assert on_this_machine(base) is here


async def test_lines_and_bytes_arrive_as_they_were_less_what_belongs_to_a_connection() -> None:
    seen: list[tuple[list[tuple[bytes, bytes]], bytes]] = []

    async def take(request: Request) -> Response:
        seen.append((request.headers.raw, await request.body()))
        return JSONResponse({"delivery": 5, "status": "accepted"}, 202)

    body = b'\xef\xbb\xbf{"a":1,\r\n "a":12345678901234567890, "e":"\\u00e9"}\xff\n'
    headers = (
        ("x-one", "1"),
        ("x-two", "caf\xe9 \xff"),
        ("host", "elsewhere.example.com"),
        ("content-length", "3"),
        ("transfer-encoding", "chunked"),
        ("connection", "close, x-private"),
        ("x-private", "of the old connection"),
        ("x-one", "2"),
        ("user-agent", "GitHub-Hookshot/044aadd"),
    )
    async with served(Starlette(routes=[Route("/webhooks/github", take, methods=["POST"])])) as port:
        base = f"http://127.0.0.1:{port}"
        async with opened(base) as client:
            answer = await send(client, base, "github", headers, body)
            empty = await send(client, base, "github", (), b"")

    assert (answer.outcome, answer.status, answer.delivery, answer.cause) == ("accepted", 202, 5, None)
    assert empty.outcome == "accepted"
    lines, received = seen[0]
    assert received == body
    own = [line for line in lines if line[0] not in (b"host", b"content-length")]
    assert own == [
        (b"x-one", b"1"),
        (b"x-two", b"caf\xe9 \xff"),
        (b"x-one", b"2"),
        (b"user-agent", b"GitHub-Hookshot/044aadd"),
    ]
    assert dict(lines)[b"content-length"] == str(len(body)).encode()
    assert seen[1][1] == b""


@pytest.mark.parametrize(
    ("response", "outcome", "cause"),
    [
        (httpx.Response(202, json={"delivery": 7, "status": "accepted"}), "accepted", None),
        (httpx.Response(200, json={"delivery": 7, "status": "duplicate"}), "duplicate", None),
        (httpx.Response(200, json={"delivery": 7, "status": "rearmed"}), "rearmed", None),
        (httpx.Response(200, json={"status": "answered"}), "answered", None),
        (httpx.Response(204), "accepted", None),
        (httpx.Response(200, text="ok"), "accepted", None),
        (httpx.Response(200, json={"status": "refused"}), "accepted", None),
        (httpx.Response(401, json={"error": "bad_signature"}), "refused", "bad_signature"),
        (httpx.Response(404, json={"error": "unknown_source"}), "refused", "unknown_source"),
        (httpx.Response(413, json={"error": "body_too_large"}), "refused", "body_too_large"),
        (httpx.Response(403, text="<h1>no</h1>"), "refused", "answered 403: <h1>no</h1>"),
        (httpx.Response(308, headers={"location": "https://evil.example"}), "refused", "redirected to https://evil.ex"),
        (httpx.Response(503, json={"error": "unavailable", "reason": "away"}), "unavailable", "unavailable: away"),
        (httpx.Response(500), "unavailable", "answered 500"),
        (httpx.Response(429, text="slow"), "unavailable", "answered 429: slow"),
        (httpx.Response(422, content=b"[" * 5000), "refused", "answered 422: ["),
    ],
)
async def test_every_answer_has_one_meaning(response: httpx.Response, outcome: Outcome, cause: str | None) -> None:
    with respx.mock() as outside:
        outside.post(f"{BASE}/webhooks/github").mock(return_value=response)
        async with opened(BASE) as client:
            answer = await send(client, BASE, "github", (), b"{}")

    assert answer.outcome == outcome
    assert answer.status == response.status_code
    assert (answer.cause or "").startswith(cause or "")
    assert (answer.cause is None) == (cause is None)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (httpx.ConnectError("refused"), "unavailable"),
        (httpx.ReadTimeout("late"), "unavailable"),
        (httpx.RemoteProtocolError("Server disconnected without sending a response."), "unavailable"),
        (httpx.RemoteProtocolError("illegal status line"), "failed"),
        (httpx.LocalProtocolError("illegal"), "failed"),
    ],
)
async def test_no_answer_is_to_be_tried_again_and_what_cannot_be_sent_is_not(error: Exception, outcome: str) -> None:
    with respx.mock() as outside:
        outside.post(f"{BASE}/webhooks/github").mock(side_effect=error)
        async with opened(BASE) as client:
            answer = await send(client, BASE, "github", (), b"{}")

    assert (answer.outcome, answer.status, answer.cause is None) == (outcome, None, False)


@pytest.mark.parametrize("headers", [(("x-\n", "1"),), (("x-a", "\u20ac"),), (("x-a", "1\r\nx-b: 2"),)])
async def test_a_line_that_no_request_can_have_fails_and_nothing_is_sent(headers: tuple[tuple[str, str], ...]) -> None:
    async with served(Starlette()) as port:
        base = f"http://127.0.0.1:{port}"
        async with opened(base) as client:
            answer = await send(client, base, "github", headers, b"{}")

    assert answer.outcome == "failed"


@asynccontextmanager
async def speaking(answer: bytes, *, hold: bool = False) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A receiver that answers with these bytes, whatever they are, and closes; its address, and what it was asked."""
    asked: list[bytes] = []
    speakers: set[asyncio.Task[None] | None] = set()

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        speakers.add(asyncio.current_task())
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        with suppress(ConnectionError):
            writer.write(answer)
            await writer.drain()
            if hold:
                await reader.read()  # until the other side has enough
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked
    finally:
        server.close()
        await asyncio.gather(*(speaker for speaker in speakers if speaker is not None))


@pytest.mark.parametrize(
    ("answer", "outcome", "status", "words"),
    [
        (b"200 OK\r\nContent-Length: 900\r\n\r\n{", "accepted", 200, ""),
        (b"202 OK\r\nTransfer-Encoding: chunked\r\n\r\nffff\r\n{", "accepted", 202, ""),
        (b"202 OK\r\nTransfer-Encoding: chunked\r\n\r\nnonsense", "accepted", 202, ""),
        (b"401 No\r\nContent-Length: 900\r\n\r\n{", "refused", 401, "answered 401: {"),
        (b"503 No\r\nContent-Length: 900\r\n\r\n", "unavailable", 503, "answered 503"),
        (
            b"307 X\r\nLocation: /\x1b[2J\x07\r\nContent-Length: 0\r\n\r\n",
            "refused",
            307,
            "redirected to /\x1b[2J\x07, which",
        ),
        (b"307 X\r\nLocation: /\xff\x9b\r\nContent-Length: 0\r\n\r\n", "refused", 307, "redirected to /"),
        (
            b"302 X\r\nLocation: http://h:99999999/\r\nContent-Length: 0\r\n\r\n",
            "refused",
            302,
            "redirected to http://h",
        ),
        (b"101 X\r\nUpgrade: x\r\n\r\n", "failed", None, "what it answered is no answer to a POST: "),
        (b"200 OK\r\n" + b"X-A: b\r\n" * 60_000, "failed", None, "what it answered is no answer to a POST: "),
        (b"200 O", "unavailable", None, "Server disconnected without"),
    ],
)
async def test_the_status_is_the_answer_whatever_comes_behind_it(
    answer: bytes, outcome: Outcome, status: int | None, words: str
) -> None:
    async with speaking(b"HTTP/1.1 " + answer) as (base, _), opened(base) as client:
        found = await send(client, base, "github", (), b"{}")
    assert (found.outcome, found.status) == (outcome, status)
    assert (found.cause or "").startswith(words)
    cut = (b"900" in answer) or (b"chunked" in answer)
    assert (found.unread is not None) == cut


@pytest.mark.parametrize("answer", [b"", b"nonsense\r\n\r\n"])
async def test_no_answer_at_all_is_told_from_one_that_is_none(answer: bytes) -> None:
    async with speaking(answer) as (base, _), opened(base) as client:
        found = await send(client, base, "github", (), b"{}")
    assert (found.outcome, found.status) == ("failed" if answer else "unavailable", None)


async def test_an_answer_whose_body_does_not_end_is_not_waited_for_any_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "WITHIN_S", 0.3)
    async with (
        speaking(b"HTTP/1.1 202 X\r\nContent-Length: 9\r\n\r\n{", hold=True) as (base, _),
        opened(base) as client,
    ):
        found = await send(client, base, "github", (), b"{}")
    assert (found.outcome, found.status, found.unread) == ("accepted", 202, "it did not come whole within 0 s")


async def test_a_packed_answer_is_not_unpacked() -> None:
    content = gzip.compress(b'{"error": "unpacked", "pad": "' + bytes(32 << 20) + b'"}')
    lines = b"HTTP/1.1 400 X\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(content)
    async with speaking(lines + content) as (base, _), opened(base) as client:
        found = await send(client, base, "github", (), b"{}")
    assert (found.status, found.cause) == (400, "answered 400")
    assert found.unread == "it is packed, which was not asked for"


async def test_an_answer_that_says_it_is_packed_and_is_not_counts_by_its_status() -> None:
    async def broken(request: Request) -> Response:
        return Response(b"none", 202, headers={"content-encoding": "gzip"})

    async with served(Starlette(routes=[Route("/webhooks/github", broken, methods=["POST"])])) as port:
        base = f"http://127.0.0.1:{port}"
        async with opened(base) as client:
            assert (await send(client, base, "github", (), b"{}")).outcome == "accepted"


async def test_a_redirect_is_not_followed() -> None:
    led: list[bytes] = []

    async def trap(request: Request) -> Response:
        led.append(await request.body())
        return Response(status_code=202)

    async def away(request: Request) -> Response:
        return RedirectResponse("/trap", 307)

    routes = [Route("/webhooks/github", away, methods=["POST"]), Route("/trap", trap, methods=["POST", "GET"])]
    async with served(Starlette(routes=routes)) as port:
        base = f"http://127.0.0.1:{port}"
        async with opened(base) as client:
            answer = await send(client, base, "github", (), b"{}")

    assert (answer.outcome, led) == ("refused", [])


async def test_cookies_of_a_receiver_are_not_carried_to_the_next_delivery() -> None:
    seen: list[str | None] = []

    async def take(request: Request) -> Response:
        seen.append(request.headers.get("cookie"))
        return Response(status_code=202, headers={"set-cookie": "a=1"})

    async with served(Starlette(routes=[Route("/webhooks/github", take, methods=["POST"])])) as port:
        base = f"http://127.0.0.1:{port}"
        async with opened(base) as client:
            for _ in range(2):
                await send(client, base, "github", (), b"{}")

    assert seen == [None, None]


def test_retry_after_is_seconds_or_a_date_and_a_day_at_most() -> None:
    in_a_minute = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)

    assert read_retry_after("5") == timedelta(seconds=5)
    assert read_retry_after("99999999") == timedelta(days=1)
    assert timedelta(seconds=50) < (read_retry_after(in_a_minute) or timedelta()) <= timedelta(seconds=60)
    assert read_retry_after("Mon, 01 Jan 2001 00:00:00 GMT") == timedelta()
    assert [read_retry_after(text) for text in (None, "soon", "-1", "\uff11")] == [None, None, None, None]


def test_a_new_signature_takes_the_place_of_the_old_one_and_the_id_stays() -> None:
    request = from_github(b"{}", guid="a-guid")
    headers = tuple((name.lower(), value) for name, value in request.headers)
    github = GitHub()

    anew = resigned(github, headers, b"{}", "another secret", 1_700_000_000)

    github.verify(anew, b"{}", ["another secret"], 1_700_000_000)
    assert [line for line in anew if line[0] == "x-github-delivery"] == [("x-github-delivery", "a-guid")]
    assert [name for name, _ in anew].count("x-hub-signature-256") == 1
    assert ("x-hub-signature-256", f"sha256={hashlib.sha256().hexdigest()}") not in anew
    assert github.dedup_key(anew, b"{}") == github.dedup_key(headers, b"{}")


def test_a_signature_with_a_time_is_fresh_and_keeps_its_message_id() -> None:
    source = StandardWebhooks()
    secret = new_secret(source.recipe)
    old = resigned(source, (("content-type", "application/json"), ("webhook-id", "msg_1")), b"{}", secret, 1_000)

    anew = resigned(source, old, b"{}", secret, 1_700_000_000)

    source.verify(anew, b"{}", [secret], 1_700_000_000)
    assert dict(anew)["webhook-id"] == "msg_1"
    assert dict(anew)["webhook-timestamp"] == "1700000000"
    assert len(anew) == 4


def test_without_an_id_the_same_body_gets_the_same_one() -> None:
    source = StandardWebhooks()
    secret = new_secret(source.recipe)

    first, second = (source.dedup_key(resigned(source, (), b"{}", secret, now), b"{}") for now in (1, 2))

    assert first == second != source.dedup_key(resigned(source, (), b"[]", secret, 1), b"[]")


def test_a_public_key_cannot_sign() -> None:
    with pytest.raises(ConfigurationError):
        resigned(StandardWebhooks(), (), b"{}", "whpk_" + "A" * 43 + "=", 1)
    assert dict(resigned(Shortcut(), (), b"{}", SECRET, 1)).keys() == {"payload-signature"}
