"""What the receiver answers, whatever it is sent, and what of it is stored."""

from __future__ import annotations

import asyncio
import base64
import json
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from datetime import timedelta
from typing import Any
from urllib.parse import quote, quote_plus

import httpx
import pytest
from consumers import SECRET, Request, Stack, digest, from_github, from_shortcut, served, stack, stories
from gates import until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from webhooks import Consumer, GitHub, Pool, Shortcut, StandardWebhooks, receiver
from webhooks.accept import Accepter
from webhooks.observe import REGISTRY
from webhooks.receiver import Receiver
from webhooks.refusals import Refusals
from webhooks.rejections import Caps
from webhooks.signatures import sign

LIMIT = 1024
STANDARD_SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef0123456789abcdef").decode()
NOW = 1_800_000_000.0
# Whole numbers past every integer type, a repeated key, spelling that no serialiser would repeat.
ODDLY_WRITTEN = b'{\n   "a": 2,\n  "id": 12345678901234567890, "f": 1.0, "e": "\\u00e9", "a": 3\n}'
ANSWERS = {200, 202, 400, 401, 404, 405, 413, 503}


def consumer() -> Consumer:
    return Consumer(gates=[], sources=[Shortcut(), GitHub(), GitHub("github_mirror"), StandardWebhooks()])


@pytest.fixture
async def here(database_url: str) -> AsyncIterator[Stack]:
    """Receiver and inbox, without a worker."""
    secrets = {"standard_webhooks": (STANDARD_SECRET,)}
    async with stack(
        database_url, consumer(), work=False, most_bytes=LIMIT, secrets=secrets, now=lambda: NOW
    ) as running:
        yield running


async def exchange(port: int, *parts: bytes, close: bool = False) -> bytes:
    """Write to the server part by part, and return all that it answers; `close` leaves without waiting for it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        if close:
            return b""
        async with asyncio.timeout(10):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def statuses(answer: bytes) -> list[int]:
    return [int(line.split(b" ")[1]) for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]


def chunked(request: Request, *chunks: bytes) -> list[bytes]:
    """The request with its body in chunks, without a Content-Length."""
    lines = [f"POST {request.path} HTTP/1.1", "Host: test", "Transfer-Encoding: chunked", "Connection: close"]
    head = "\r\n".join([*lines, *(f"{name}: {value}" for name, value in request.headers)]).encode() + b"\r\n\r\n"
    return [head, *(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n" for chunk in chunks), b"0\r\n\r\n"]


# Answers


@pytest.mark.invariant(2)
@pytest.mark.invariant(12)
async def test_a_signed_delivery_is_answered_202_and_stored_byte_for_byte(here: Stack) -> None:
    answer = await here.send(from_shortcut(ODDLY_WRITTEN))
    [stored] = await here.deliveries()
    assert answer.status_code == 202
    assert answer.json() == {"delivery": stored["id"], "status": "accepted"}
    assert (stored["status"], stored["source"], stored["body"]) == ("received", "shortcut", ODDLY_WRITTEN)


@pytest.mark.invariant(3)
async def test_a_second_copy_is_answered_200_and_named_by_the_first_ones_id(here: Stack) -> None:
    request = from_shortcut(stories(1))
    first, second = await here.send(request), await here.send(request)
    assert second.status_code == 200
    assert second.json() == {"delivery": first.json()["delivery"], "status": "duplicate"}
    assert len(await here.deliveries()) == 1


@pytest.mark.invariant(3)
async def test_parallel_posts_of_one_delivery_store_one_row_and_are_all_answered_2xx(here: Stack) -> None:
    request = from_shortcut(stories(1))
    answers = await asyncio.gather(*(here.send(request) for _ in range(20)))
    assert sorted(answer.status_code for answer in answers) == [200] * 19 + [202]
    assert len({answer.json()["delivery"] for answer in answers}) == 1
    assert len(await here.deliveries()) == 1


@pytest.mark.invariant(1)
async def test_a_signature_that_is_not_right_is_answered_401_with_its_cause_and_nothing_is_stored(here: Stack) -> None:
    request = from_github(b"{}")
    wrong = {
        "sha256=é" + "0" * 63: "malformed_header",
        "sha256=": "malformed_header",
        "": "missing_signature",
        "SHA256=" + digest(b"{}"): "malformed_header",
        "sha256=" + "0" * 10_000: "malformed_header",
        "sha256=" + "0" * 64: "bad_signature",
        "sha256=" + digest(b"{}", "another secret"): "bad_signature",
    }
    async with served(here.receiver) as port:
        for signature, cause in wrong.items():
            headers = [(name, signature if name == "X-Hub-Signature-256" else value) for name, value in request.headers]
            raw = await exchange(port, Request(request.path, [*headers, ("Connection", "close")], b"{}").raw())
            assert statuses(raw) == [401]
            assert json.loads(raw.split(b"\r\n\r\n", 1)[1]) == {"error": cause}
            assert digest(b"{}").encode() not in raw
    assert await here.deliveries() == []


@pytest.mark.invariant(1)
async def test_a_request_without_a_signature_or_with_two_is_refused(here: Stack) -> None:
    request = from_github(b"{}")
    unsigned = [header for header in request.headers if header[0] != "X-Hub-Signature-256"]
    twice = [*request.headers, ("X-Hub-Signature-256", f"sha256={digest(b'{}')}")]
    for headers, cause in ((unsigned, "missing_signature"), (twice, "duplicate_header")):
        answer = await here.send(Request(request.path, headers, b"{}"))
        assert (answer.status_code, answer.json()) == (401, {"error": cause})
    assert await here.deliveries() == []


@pytest.mark.invariant(1)
async def test_one_right_signature_in_a_list_is_enough(here: Stack) -> None:
    lists = {"garbage {good}": 202, "{good}  v1,AAAA": 202, "v1,AAAA": 401, "garbage": 401, "{good},x": 401}
    for place, (written, status) in enumerate(lists.items()):
        signed = sign(StandardWebhooks.recipe, b"{}", STANDARD_SECRET, now=NOW, id=f"msg_{place}")
        headers = [
            (name, written.replace("{good}", value) if name == "webhook-signature" else value) for name, value in signed
        ]
        answer = await here.send(Request("/webhooks/standard_webhooks", headers, b"{}"))
        assert answer.status_code == status, written
    assert len(await here.deliveries()) == 2


@pytest.mark.invariant(1)
async def test_a_signed_time_that_is_stale_or_no_time_is_refused(here: Stack) -> None:
    off = int(timedelta(hours=4).total_seconds())
    refused = {
        str(int(NOW) - off): "stale_timestamp",
        str(int(NOW) + off): "stale_timestamp",
        "nan": "malformed_header",
        "1700000000.9": "malformed_header",
        "-1": "malformed_header",
        "1_700": "malformed_header",
    }
    for timestamp, cause in refused.items():
        signed_at = float(timestamp) if timestamp.isdigit() else NOW
        signed = sign(StandardWebhooks.recipe, b"{}", STANDARD_SECRET, now=signed_at, id="msg_1")
        headers = [(name, timestamp if name == "webhook-timestamp" else value) for name, value in signed]
        answer = await here.send(Request("/webhooks/standard_webhooks", headers, b"{}"))
        assert (answer.status_code, answer.json()) == (401, {"error": cause}), timestamp
    assert await here.deliveries() == []


async def test_a_redelivery_may_be_signed_with_a_new_time_and_is_the_same_delivery(here: Stack) -> None:
    for now, status in ((NOW, 202), (NOW + 200, 200)):
        signed = sign(StandardWebhooks.recipe, b"{}", STANDARD_SECRET, now=now, id="msg_1")
        answer = await here.send(Request("/webhooks/standard_webhooks", list(signed), b"{}"))
        assert answer.status_code == status


async def test_every_secret_in_force_is_good_while_one_is_replaced(database_url: str) -> None:
    secrets = {"shortcut": ("the next secret", SECRET)}
    async with stack(database_url, consumer(), work=False, secrets=secrets) as running:
        for secret, status in ((SECRET, 202), ("the next secret", 202), ("the one before", 401)):
            body = stories(1)
            answer = await running.send(from_shortcut(body, signature=digest(body, secret)))
            assert answer.status_code == status


@pytest.mark.invariant(1)
async def test_a_source_without_a_secret_takes_nothing(here: Stack) -> None:
    for secrets in ({"shortcut": ()}, dict[str, tuple[str, ...]]()):
        unset = Receiver({"shortcut": Shortcut()}, secrets, here.accepter, max_body_bytes=LIMIT)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(unset), base_url="http://test") as client:
            request = from_shortcut(b"{}", signature=digest(b"{}", ""))
            answer = await client.post(request.path, headers=request.headers, content=request.body)
        assert (answer.status_code, answer.json()) == (401, {"error": "no_secret"})


async def test_v2s_test_of_the_url_is_answered_and_not_stored(here: Stack) -> None:
    answer = await here.send(from_shortcut(b'{"type":"validation"}'))
    assert (answer.status_code, answer.json()) == (200, {"status": "answered"})
    assert (await here.send(from_shortcut(b'{"type":"validation"}', signature="0" * 64))).status_code == 401
    assert await here.deliveries() == []


async def test_only_the_headers_that_are_needed_are_kept_in_their_order(here: Stack) -> None:
    request = from_github(b"{}", guid="a-guid")
    others = [("Authorization", "Bearer of a secret"), ("Cookie", "session=1"), ("User-Agent", "GitHub-Hookshot/1")]
    await here.send(Request(request.path, request.headers + others, b"{}"))
    [stored] = await here.deliveries()
    kept = [[name.lower(), value] for name, value in request.headers]
    assert stored["headers"] == [*kept, ["user-agent", "GitHub-Hookshot/1"]]


async def test_what_is_not_there_is_answered_404_and_what_is_no_post_405(here: Stack) -> None:
    for method, path, status, error in [
        ("POST", "/webhooks/nobody", 404, "unknown_source"),
        ("POST", "/webhooks/", 404, "unknown_source"),
        ("POST", "/webhooks", 404, "not_found"),
        ("POST", "/", 404, "not_found"),
        ("GET", "/healthz/", 404, "not_found"),
        ("GET", "/webhooks/shortcut", 405, "use POST"),
        ("PUT", "/webhooks/shortcut", 405, "use POST"),
        ("POST", "/healthz", 405, "wrong_method"),
    ]:
        answer = await here.client.request(method, path)
        assert (answer.status_code, answer.json()) == (status, {"error": error})
        assert ("allow" in answer.headers) == (status == 405)


async def test_a_path_may_end_in_a_slash(here: Stack) -> None:
    request = from_shortcut(stories(1))
    answer = await here.send(Request(f"{request.path}/", request.headers, request.body))
    assert answer.status_code == 202


@pytest.mark.parametrize(
    ("path", "right"),
    [
        ("//webhooks/shortcut", "/webhooks/shortcut"),
        ("/proxied/webhooks/github", "/webhooks/github"),
        ("/webhooks/GitHub", "/webhooks/github"),
        ("/Webhooks/Shortcut/", "/webhooks/shortcut"),
        ("/shortcut", "/webhooks/shortcut"),
        ("/webhooks/gihtub", "/webhooks/github"),
        ("/webhooks/standard-webhooks", "/webhooks/standard_webhooks"),
        ("/favicon.ico", None),
        ("/webhooks/", None),
    ],
)
async def test_a_wrong_path_is_counted_and_told_with_what_was_meant(here: Stack, path: str, right: str | None) -> None:
    before = REGISTRY.get_sample_value("webhooks_wrong_paths_total") or 0
    with capture_logs() as told:
        for _ in range(3):
            assert await asked(here, {"path": path, "method": "POST", "headers": []}, [b"{}"]) == 404
    assert REGISTRY.get_sample_value("webhooks_wrong_paths_total") == before + 3
    [line] = [line for line in told if "path" in line]
    assert (line["path"], line["meant"]) == (path, right)


async def test_healthz_answers_while_the_receiver_lives(here: Stack) -> None:
    answer = await here.client.get("/healthz")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


# Identity


@pytest.mark.invariant(3)
async def test_one_guid_is_two_deliveries_where_hook_or_source_differ_and_one_where_both_are_equal(here: Stack) -> None:
    guid = str(uuid.uuid4())
    posts = [
        (from_github(b'{"n":1}', guid=guid, hook="101"), 202),
        (from_github(b'{"n":2}', guid=guid, hook="102"), 202),
        (from_github(b'{"n":2}', guid=guid, hook="101", source="github_mirror"), 202),
        (from_github(b'{"n":2}', guid=guid, hook="101"), 200),
    ]
    assert [(await here.send(request)).status_code for request, _ in posts] == [status for _, status in posts]
    assert [(row["source"], row["body"]) for row in await here.deliveries()] == [
        ("github", b'{"n":1}'),
        ("github", b'{"n":2}'),
        ("github_mirror", b'{"n":2}'),
    ]


# Size, chunks and lengths


@pytest.mark.parametrize("framing", ["length", "chunks"])
async def test_the_limit_is_exact_with_and_without_a_length(here: Stack, framing: str) -> None:
    fits: list[bytes] = []
    async with served(here.receiver) as port:
        for size in (LIMIT - 1, LIMIT, LIMIT + 1, 2 * LIMIT):
            body = b"[" + b" " * (size - 2) + b"]"
            fits += [body] if size <= LIMIT else []
            request = from_shortcut(body)
            if framing == "length":
                whole = Request(request.path, [*request.headers, ("Connection", "close")], body)
                raw = await exchange(port, whole.raw())
            else:
                raw = await exchange(port, *chunked(request, body[:700], body[700:]))
            assert statuses(raw) == [202 if size <= LIMIT else 413]
            if size > LIMIT:
                assert json.loads(raw.split(b"\r\n\r\n", 1)[1]) == {"error": "body_too_large", "limit_bytes": LIMIT}
    assert [row["body"] for row in await here.deliveries()] == fits


async def test_the_answer_to_a_body_that_is_too_long_reaches_a_sender_that_reads_it_last(here: Stack) -> None:
    async with served(here.receiver) as port:
        assert statuses(await exchange(port, from_shortcut(b"x" * 10_000_000).raw())) == [413]


async def test_a_body_that_never_ends_is_refused_as_soon_as_it_is_too_long_and_the_connection_is_closed(
    here: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "LINGER_S", 0.1)
    request = from_shortcut(b"")
    head, *_ = chunked(request)
    async with served(here.receiver) as port:
        # Neither the last chunk nor the end of the stream ever comes.
        raw = await exchange(port, head, f"{LIMIT + 1:x}\r\n".encode() + b"x" * (LIMIT + 1) + b"\r\n")
    assert statuses(raw) == [413]
    assert b"connection: close" in raw.lower()


@pytest.mark.invariant(1)
async def test_a_length_that_is_too_short_cuts_the_request_and_the_rest_is_no_request(here: Stack) -> None:
    body = b" " * 2048
    request = from_shortcut(body)
    # Where those ten bytes are what was signed, they are a whole delivery.
    short = from_shortcut(body, signature=digest(body[:10]))
    async with served(here.receiver) as port:
        for sent, status in ((request, 401), (short, 202)):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            raw = sent.raw(length=10)
            writer.write(raw[: 10 - len(body)])
            assert statuses(await reader.readuntil(b"}")) == [status]
            writer.write(raw[10 - len(body) :])
            assert statuses(await reader.read()) == [400]
            writer.close()
        # In one piece, the server may answer before the application does.
        assert not {200, 202} & set(statuses(await exchange(port, request.raw(length=10))))
    assert [row["body"] for row in await here.deliveries()] == [body[:10]]


@pytest.mark.parametrize("framing", ["length", "chunks"])
async def test_a_sender_that_leaves_in_the_middle_leaves_nothing(here: Stack, framing: str) -> None:
    body = stories(1)
    # What had come is signed rightly, so that only its missing end can speak against it.
    cut = from_shortcut(body, signature=digest(body[:20]))
    async with served(here.receiver) as port:
        if framing == "length":
            await exchange(port, cut.raw()[: 20 - len(body)], close=True)
        else:
            await exchange(port, *chunked(cut, body[:20])[:2], close=True)
        # The same delivery, whole, is a new one.
        request = from_shortcut(body)
        whole = Request(request.path, [*request.headers, ("Connection", "close")], body)
        assert statuses(await exchange(port, whole.raw())) == [202]
    assert [row["body"] for row in await here.deliveries()] == [body]


async def test_a_body_may_be_cut_into_chunks_anywhere_inside_a_character(here: Stack) -> None:
    async with served(here.receiver) as port:
        for cut in range(5):
            body = b'{"title":"ok \xf0\x9f\x98\x8a","n":%d}' % cut
            at = body.index(b"\xf0") + cut
            assert statuses(await exchange(port, *chunked(from_shortcut(body), body[:at], body[at:]))) == [202]
        every = b'{"title":"ok \xf0\x9f\x98\x8a"}'
        pieces = [every[place : place + 1] for place in range(len(every))]
        assert statuses(await exchange(port, *chunked(from_shortcut(every), *pieces))) == [202]
    stored = [row["body"] for row in await here.deliveries()]
    assert len(stored) == 6
    assert stored[-1] == every


async def test_two_framings_at_once_are_not_read_as_two_requests(here: Stack) -> None:
    request = from_shortcut(b"0\r\n\r\n")
    smuggled = Request(request.path, [*request.headers, ("Transfer-Encoding", "chunked")], b"0\r\n\r\n")
    async with served(here.receiver) as port:
        assert not {200, 202} & set(statuses(await exchange(port, smuggled.raw(length=5) + b"GET /x HTTP/1.1\r\n\r\n")))
    assert await here.deliveries() == []


# Whatever it is sent

FORM = "application/x-www-form-urlencoded"


BODIES = [
    b'{"t":"a\\u0000b"}',
    b'{"t":"\\ud83d"}',
    b'{"n":NaN}',
    b'{"n":1e400}',
    b"[" * 2_000 + b"]" * 2_000,
    b"[" * 100_000,
    b"null",
    b"[]",
    b'"x"',
    b"",
    b"\xff",
    b"\xef\xbb\xbf{}",
    '{"t":"😊"}'.encode(),
    b"{",
    b'{"id": ' + b"9" * 5_000 + b"}",
    b'{"id": "a\\u0000b\\ud83d"}',
    b'{"id": {"a": 1}}',
]


@pytest.mark.parametrize("signed", [from_shortcut, from_github])
async def test_a_verified_body_is_stored_whatever_is_in_it(
    database_url: str, signed: Callable[[bytes], Request]
) -> None:
    async with stack(database_url, consumer(), work=False) as running:
        for body in BODIES:
            assert (await running.send(signed(body))).status_code == 202
        assert [row["body"] for row in await running.deliveries()] == BODIES


async def test_a_form_is_verified_over_the_bytes_as_they_came(here: Stack) -> None:
    bodies = [
        b"payload=" + quote('{"action":"opened"}').encode(),
        b"x=1&payload=" + quote_plus('{"action": "opened", "t": "é"}').encode(),
        b"no=payload",
    ]
    for content_type in (FORM, f"{FORM}; charset=UTF-8"):
        for body in bodies:
            assert (await here.send(from_github(body, content_type=content_type))).status_code == 202
    assert [row["body"] for row in await here.deliveries()] == bodies * 2


SCOPE = {"type": "http", "http_version": "1.1", "scheme": "http", "query_string": b"", "root_path": ""}


@st.composite
def requests(draw: st.DrawFn) -> tuple[dict[str, Any], list[bytes]]:
    """An ASGI request: one that a provider would make, with some of its parts exchanged for others."""
    body = draw(st.binary(max_size=LIMIT + 200) | st.text(max_size=100).map(lambda text: text.encode()))
    real = draw(st.sampled_from([from_github, from_shortcut]))(body)
    value = st.binary(max_size=80).map(lambda value: value.translate(None, b"\r\n\x00"))
    signature = st.sampled_from([f"sha256={digest(body)}".encode(), digest(body).encode()]) | value
    signing = st.sampled_from([b"payload-signature", b"x-hub-signature-256", b"webhook-signature"])
    other = st.sampled_from([b"content-type", b"x-github-event", b"x-github-delivery", b"webhook-id", b"host"])
    odd_headers = st.lists(st.tuples(signing, signature) | st.tuples(other, value), max_size=6)
    headers = [(name.lower().encode(), text.encode()) for name, text in real.headers]
    known = ["/webhooks/github", "/webhooks/standard_webhooks", "/healthz", "/webhooks/", "/"]
    odd_path = st.sampled_from(known) | st.text(max_size=30).map(lambda text: "/" + text)
    odd_method = st.sampled_from(["GET", "HEAD", "OPTIONS", "DELETE", "PURGE", "post", ""])
    cuts = sorted(draw(st.lists(st.integers(0, len(body)), max_size=3)))
    path = draw(st.just(real.path) | odd_path)
    scope = {
        "method": draw(st.just("POST") | st.just("POST") | odd_method),
        "path": path,
        "raw_path": path.encode(),
        "headers": draw(st.just(headers) | odd_headers | odd_headers.map(lambda more: headers + more)),
    }
    return scope, [body[start:end] for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True)]


async def asked(running: Stack, scope: dict[str, Any], parts: list[bytes]) -> int:
    waiting = [
        {"type": "http.request", "body": part, "more_body": place < len(parts)} for place, part in enumerate(parts, 1)
    ]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return waiting.pop(0) if waiting else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await running.receiver({**SCOPE, "client": ("127.0.0.1", 1), "server": ("test", 80), **scope}, receive, send)
    return int(sent[0]["status"])


@pytest.mark.invariant(1)
def test_no_request_gets_a_500_and_only_verified_bytes_are_stored(database_url: str) -> None:
    # The loop stands still while examples are made: what runs in it draws random numbers of its own.
    with asyncio.Runner() as runner:
        ending = AsyncExitStack()
        here = runner.run(
            ending.enter_async_context(stack(database_url, consumer(), work=False, most_bytes=LIMIT, now=lambda: NOW))
        )

        @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(requests())
        def check(request: tuple[dict[str, Any], list[bytes]]) -> None:
            assert runner.run(asked(here, *request)) in ANSWERS

        try:
            check()
            stored = runner.run(here.deliveries())
        finally:
            runner.run(ending.aclose())
    assert stored, "no example was signed rightly"
    for row in stored:
        [signature] = [value for name, value in row["headers"] if name in ("payload-signature", "x-hub-signature-256")]
        assert signature.removeprefix("sha256=") == digest(row["body"])


async def test_a_fault_of_our_own_is_a_503_that_asks_for_another_try(
    here: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(here.receiver, "_now", lambda: 1 / 0)
    answer = await here.send(from_shortcut(b"{}"))
    assert (answer.status_code, answer.json()) == (503, {"error": "unexpected"})
    assert int(answer.headers["retry-after"]) > 0


async def test_every_answer_is_counted_by_source_and_outcome(here: Stack) -> None:
    def count(outcome: str) -> float:
        labels = {"source": "shortcut", "outcome": outcome}
        return REGISTRY.get_sample_value("webhooks_deliveries_total", labels) or 0

    before = {outcome: count(outcome) for outcome in ("accepted", "duplicate", "rejected", "too_large")}
    request = from_shortcut(stories(1))
    for sent in (request, request, from_shortcut(b"{}", signature="0" * 64), from_shortcut(b" " * 2 * LIMIT)):
        await here.send(sent)
    await until(lambda: all(count(outcome) == number + 1 for outcome, number in before.items()))


async def test_a_body_that_does_not_end_in_time_is_refused_and_the_connection_closed(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "BODY_WITHIN_S", 0.1)
    monkeypatch.setattr(receiver, "LINGER_S", 0.1)
    consumer = Consumer(gates=[], sources=[Shortcut()])
    app = Receiver(
        consumer.sources, {"shortcut": ["s"]}, Accepter(pool, consumer, lambda moved: None), max_body_bytes=1024
    )
    sent: list[Any] = []
    begun = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if begun.is_set():
            await asyncio.Event().wait()
        begun.set()
        return {"type": "http.request", "body": b"{", "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/webhooks/shortcut", "headers": []}
    await asyncio.wait_for(app(scope, receive, send), 5)
    assert sent[0]["status"] == 400
    assert (b"connection", b"close") in sent[0]["headers"]
    assert b"body_too_slow" in sent[1]["body"]


# Memory before anything is verified


class Sender:
    """One request at a receiver without a socket: its body is handed over part by part."""

    def __init__(self, app: Receiver, request: Request) -> None:
        self.parts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.asked = asyncio.Event()
        self.answered: list[dict[str, Any]] = []
        headers = [(name.lower().encode(), value.encode()) for name, value in request.headers]
        scope = {**SCOPE, "method": "POST", "path": request.path, "headers": headers}
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self.parts.empty():
            self.asked.set()
        return await self.parts.get()

    async def _send(self, message: Any) -> None:
        self.answered.append(message)

    async def hands(self, part: bytes, *, more: bool = True) -> None:
        """Hand a part over, and return once the receiver wants the next one, or has ended."""
        self.asked.clear()
        self.parts.put_nowait({"type": "http.request", "body": part, "more_body": more})
        asked = asyncio.create_task(self.asked.wait())
        await asyncio.wait({asked, self.task}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()

    async def leaves(self) -> None:
        self.parts.put_nowait({"type": "http.disconnect"})
        await self.task

    @property
    def status(self) -> int | None:
        return self.answered[0]["status"] if self.answered else None


LONG = 100 * 1024


@pytest.fixture
async def narrow(database_url: str) -> AsyncIterator[Callable[[Request], Sender]]:
    """Senders to a receiver with memory for one body of 100 KiB besides what is free."""
    sources = {"shortcut": Shortcut()}
    async with stack(database_url, Consumer(gates=[], sources=list(sources.values())), work=False) as running:
        signing = {"shortcut": (SECRET,)}
        app = Receiver(sources, signing, running.accepter, max_body_bytes=1 << 20, unverified_bytes=LONG)
        yield lambda request: Sender(app, request)


async def test_bodies_that_are_being_read_are_bounded_together_and_short_ones_still_pass(
    narrow: Callable[[Request], Sender], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "LINGER_S", 0.05)
    long, short = from_shortcut(b" " * 2 * LONG), from_shortcut(b"[" + b" " * 60_000 + b"]")
    holding = narrow(long)
    for _ in range(2):
        await holding.hands(b" " * (LONG // 2 + 30_000))

    refused = narrow(long)
    for _ in range(3):
        await refused.hands(b" " * LONG)
    await refused.task
    assert refused.status == 503
    told = dict(refused.answered[0]["headers"])
    assert int(told[b"retry-after"]) > 0
    assert told[b"connection"] == b"close"
    assert b"too_many_long_bodies" in refused.answered[1]["body"]

    passing = narrow(short)
    await passing.hands(short.body[:30_000])
    await passing.hands(short.body[30_000:], more=False)
    await passing.task
    assert passing.status == 202

    # Whoever held the memory has lost nothing, and gives it back.
    await holding.hands(b" " * (2 * LONG - 2 * (LONG // 2 + 30_000)), more=False)
    await holding.task
    assert holding.status == 202
    again = narrow(from_shortcut(b"  " * LONG))
    await again.hands(b" " * LONG)
    await again.hands(b" " * LONG, more=False)
    await again.task
    assert again.status == 200


@pytest.mark.parametrize("end", ["leaves", "wrong", "too large", "too slow", "right"])
async def test_the_memory_of_a_body_is_given_back_however_it_ends(
    narrow: Callable[[Request], Sender], monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(receiver, "LINGER_S", 0.05)
    if end == "too slow":
        monkeypatch.setattr(receiver, "BODY_WITHIN_S", 0.1)
    body = b" " * 2 * LONG
    for _ in range(5):
        sender = narrow(from_shortcut(body, signature="0" * 64 if end == "wrong" else None))
        await sender.hands(body[:LONG])
        await sender.hands(body[: LONG // 2])
        if end == "leaves":
            await sender.leaves()
        elif end == "too large":
            await sender.hands(b" " * (2 << 20))
        elif end != "too slow":
            await sender.hands(body[: LONG // 2], more=False)
        await sender.task
        expected: dict[str, set[int | None]] = {
            "leaves": {None},
            "wrong": {401},
            "too large": {413},
            "too slow": {400},
            "right": {200, 202},
        }
        assert sender.status in expected[end]


async def test_a_head_that_does_not_end_is_refused_and_a_long_one_is_not(here: Stack) -> None:
    request = from_shortcut(b"{}")
    async with served(here.receiver) as port:
        long = Request(request.path, [*request.headers, ("X-Long", "a" * 30_000), ("Connection", "close")], b"{}")
        assert statuses(await exchange(port, long.raw())) == [202]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /webhooks/shortcut HTTP/1.1\r\nHost: test\r\nX-Endless: ")
        taken = 0
        with suppress(ConnectionError):
            while taken < 100 << 20:
                writer.write(b"a" * 65_536)
                await writer.drain()
                taken += 65_536
        assert taken < 8 << 20  # what the kernel holds on both sides, and no more
        writer.close()
        with suppress(ConnectionError):
            assert statuses(await reader.read()) in ([400], [])


async def test_a_body_of_one_byte_a_chunk_is_taken(database_url: str) -> None:
    async with stack(database_url, consumer(), work=False) as running, served(running.receiver) as port:
        body = b"[" + b" " * 100_000 + b"]"
        head, *chunks = chunked(from_shortcut(body), *(body[place : place + 1] for place in range(len(body))))
        assert statuses(await exchange(port, head, b"".join(chunks))) == [202]


async def test_requests_on_one_connection_are_bounded_each_by_itself(here: Stack) -> None:
    async with served(here.receiver) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for n in range(6):
            request = from_shortcut(stories(n))
            long = Request(request.path, [*request.headers, ("X-Long", "a" * 30_000)], request.body)
            writer.write(long.raw())
            assert statuses(await reader.readuntil(b"}")) == [202]
        writer.close()


async def test_trailers_are_bounded(here: Stack) -> None:
    head, *_ = chunked(from_shortcut(b""))
    async with served(here.receiver) as port:
        endless = [b"0\r\n", *(b"X-%d: " % n + b"a" * 60_000 + b"\r\n" for n in range(200))]
        raw = await exchange(port, head, *endless)
        assert 202 not in statuses(raw)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        taken = 0
        writer.write(head + b"0\r\n")
        with suppress(ConnectionError):
            while taken < 100 << 20:
                writer.write(b"X: " + b"a" * 60_000 + b"\r\n")
                await writer.drain()
                taken += 60_000
        assert taken < 8 << 20
        writer.close()
        with suppress(ConnectionError):
            await reader.read()


# What was refused


async def test_the_answer_to_a_refused_request_does_not_wait_for_its_being_kept(pool: Pool) -> None:
    sources = {"shortcut": Shortcut()}
    # Nobody writes: whoever waited for that would wait for ever.
    kept = Refusals(pool, sources, Caps(rows=10, bytes=1 << 20, age=timedelta(days=1)))
    accepter = Accepter(pool, Consumer(gates=[], sources=list(sources.values())), lambda moved: None)
    app = Receiver(sources, {"shortcut": (SECRET,)}, accepter, max_body_bytes=1024, refusals=kept)
    waiting: list[int] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        waiting.append(kept.waiting)

    scope = {**SCOPE, "method": "POST", "path": "/webhooks/shortcut", "headers": []}
    await asyncio.wait_for(app(scope, receive, send), 5)
    assert waiting == [0, 0]
    assert kept.waiting == 1


async def test_a_refused_request_that_cannot_be_kept_is_answered_all_the_same(pool: Pool) -> None:
    sources = {"shortcut": Shortcut()}
    nothing = Refusals(pool, {}, Caps(rows=10, bytes=1 << 20, age=timedelta(days=1)))  # does not know the source
    accepter = Accepter(pool, Consumer(gates=[], sources=list(sources.values())), lambda moved: None)
    app = Receiver(sources, {"shortcut": (SECRET,)}, accepter, max_body_bytes=1024, refusals=nothing)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        assert (await client.post("/webhooks/shortcut", content=b"{}")).status_code == 401
