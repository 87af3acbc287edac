"""What a provider's answer means for the effect that asked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import httpx
import pytest
import respx

from handlers.calls import LONGEST_PAUSE, RATE_LIMIT_PAUSE, ProviderFailed, call, pause
from webhooks import NotDone

NOW = datetime(2026, 6, 12, 10, 0, 0, tzinfo=UTC)
EPOCH = int(NOW.timestamp())
SECOND = timedelta(seconds=1)


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url="https://api.example.test/v3", headers={"Token": "the-token"}) as client:
        yield client


@pytest.mark.parametrize(
    ("status", "headers", "asked"),
    [
        (429, {}, RATE_LIMIT_PAUSE),
        (429, {"Retry-After": "7"}, 7 * SECOND),
        (429, {"Retry-After": " 7 "}, 7 * SECOND),
        (429, {"Retry-After": "0"}, SECOND),
        (429, {"Retry-After": "-5"}, RATE_LIMIT_PAUSE),
        (429, {"Retry-After": "7.5"}, RATE_LIMIT_PAUSE),
        (429, {"Retry-After": "\u0667"}, RATE_LIMIT_PAUSE),
        (429, {"Retry-After": "999999999"}, LONGEST_PAUSE),
        (429, {"Retry-After": "9" * 5000}, RATE_LIMIT_PAUSE),
        (429, {"Retry-After": "soon"}, RATE_LIMIT_PAUSE),
        (429, {"Retry-After": "Fri, 12 Jun 2026 10:02:00 GMT"}, 120 * SECOND),
        (429, {"Retry-After": "Fri, 12 Jun 2026 10:02:00 -0000"}, 120 * SECOND),
        (429, {"Retry-After": "Fri, 12 Jun 2026 09:00:00 GMT"}, SECOND),
        (429, {"x-ratelimit-remaining": "0", "x-ratelimit-reset": str(EPOCH + 90)}, 90 * SECOND),
        (429, {"x-ratelimit-remaining": "0", "x-ratelimit-reset": "never"}, RATE_LIMIT_PAUSE),
        (403, {"Retry-After": "30"}, 30 * SECOND),
        (403, {"x-ratelimit-remaining": "0", "x-ratelimit-reset": str(EPOCH + 90)}, 90 * SECOND),
        (403, {"x-ratelimit-remaining": "0", "x-ratelimit-reset": str(EPOCH - 90)}, SECOND),
        (403, {"x-ratelimit-remaining": "12", "x-ratelimit-reset": str(EPOCH + 90)}, None),
        (403, {}, None),
        (404, {"Retry-After": "7"}, None),
        (422, {"x-ratelimit-remaining": "0", "x-ratelimit-reset": str(EPOCH + 90)}, None),
    ],
)
def test_how_long_a_refusal_asks_to_wait(status: int, headers: dict[str, str], asked: timedelta | None) -> None:
    assert pause(status, httpx.Headers(headers, encoding="utf-8"), NOW) == asked


@respx.mock
async def test_an_answer_is_its_json(http: httpx.AsyncClient) -> None:
    respx.get("https://api.example.test/v3/stories/5").respond(json={"id": 5})
    assert await call(http, "GET", "/stories/5") == {"id": 5}


@respx.mock
async def test_too_many_requests_were_not_done_and_wait_as_long_as_asked(http: httpx.AsyncClient) -> None:
    respx.post("https://api.example.test/v3/x").respond(429, headers={"Retry-After": "7"}, json={"message": "slow"})
    with pytest.raises(NotDone, match=r"^api\.example\.test answered 429 to POST /x: slow$") as refusal:
        await call(http, "POST", "/x", json={})
    assert refusal.value.retry_after == timedelta(seconds=7)


@respx.mock
@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 409, 422])
async def test_a_refusal_was_not_done_and_repeats_what_the_provider_says_but_no_token(
    http: httpx.AsyncClient, status: int
) -> None:
    said = {"message": "Validation Failed", "errors": [{"code": "custom", "message": "already exists"}]}
    respx.post("https://api.example.test/v3/x").respond(status, json=said)
    with pytest.raises(NotDone, match=rf"answered {status} to POST /x: Validation Failed; .*already exists") as refusal:
        await call(http, "POST", "/x")
    assert refusal.value.retry_after is None
    assert "the-token" not in str(refusal.value)


@respx.mock
@pytest.mark.parametrize(
    ("body", "shown"),
    [(b"<h1>no</h1>", "<h1>no</h1>"), (b"", "Not Found"), (b"[1]", r"\[1\]"), (b'{"message": 5}', '{"message": 5}')],
)
async def test_a_refusal_in_any_other_form_is_shown_as_it_came(
    http: httpx.AsyncClient, body: bytes, shown: str
) -> None:
    respx.get("https://api.example.test/v3/x").respond(404, content=body)
    with pytest.raises(NotDone, match=f"GET /x: {shown}$"):
        await call(http, "GET", "/x")


@respx.mock
@pytest.mark.parametrize("failure", [httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout])
async def test_without_a_connection_it_was_not_done(
    http: httpx.AsyncClient, failure: type[httpx.TransportError]
) -> None:
    respx.get("https://api.example.test/v3/x").mock(side_effect=failure("name not known"))
    with pytest.raises(NotDone, match=r"^no connection to api\.example\.test: name not known$"):
        await call(http, "GET", "/x")


@respx.mock
@pytest.mark.parametrize("failure", [httpx.ReadTimeout, httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError])
async def test_a_connection_that_breaks_later_leaves_it_unknown(
    http: httpx.AsyncClient, failure: type[httpx.TransportError]
) -> None:
    respx.post("https://api.example.test/v3/x").mock(side_effect=failure("broken"))
    with pytest.raises(failure):
        await call(http, "POST", "/x")


@respx.mock
@pytest.mark.parametrize("status", [500, 502, 503, 504])
async def test_a_failing_server_leaves_it_unknown_and_is_asked_only_once(http: httpx.AsyncClient, status: int) -> None:
    route = respx.post("https://api.example.test/v3/x").respond(status, text="oops")
    with pytest.raises(ProviderFailed, match=f"answered {status} to POST /x: oops"):
        await call(http, "POST", "/x")
    assert route.call_count == 1


async def test_a_port_nobody_listens_on_is_no_connection() -> None:
    async with httpx.AsyncClient(base_url="http://127.0.0.1:9") as http:
        with pytest.raises(NotDone, match=r"^no connection to 127\.0\.0\.1: "):
            await call(http, "GET", "/x")
