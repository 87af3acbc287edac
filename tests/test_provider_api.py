"""Calls to GitHub and Shortcut: waiting where asked to, repeating what is harmless, and errors that say what to do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import httpx
import pytest
import respx

from webhooks.errors import ConfigurationError, ProviderError
from webhooks.provider_api import Clock, ProviderClient, decoded, github_client, request, shortcut_client
from webhooks.settings import Settings

NOW = 1_780_000_000.0
TOKEN = "ghp_invented0123456789"
HERE, SHORTCUT = "https://github.test/api/v3", "https://shortcut.test/api/v3"
SETTINGS = Settings(github_token=TOKEN, github_api=HERE, shortcut_token="sc-invented", shortcut_api=SHORTCUT)


class Waits:
    """A clock that does not wait, and remembers how long it would have."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    @property
    def clock(self) -> Clock:
        return Clock(lambda: NOW + sum(self.slept), self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


@pytest.fixture
def waits() -> Waits:
    return Waits()


@pytest.fixture
async def github() -> AsyncIterator[ProviderClient]:
    async with github_client(SETTINGS) as client:
        yield client


@respx.mock
async def test_each_client_speaks_to_its_provider_with_its_token(github: ProviderClient, waits: Waits) -> None:
    hook = respx.get(f"{HERE}/repos/acme/app/hooks/1").respond(json={"id": 1})
    story = respx.get(f"{SHORTCUT}/stories/7").respond(json={"id": 7})

    assert decoded(await request(github, "GET", "/repos/acme/app/hooks/1", clock=waits.clock)) == {"id": 1}
    async with shortcut_client(SETTINGS) as shortcut:
        assert decoded(await request(shortcut, "GET", "/stories/7", clock=waits.clock)) == {"id": 7}

    sent = hook.calls.last.request.headers
    assert sent["authorization"] == f"Bearer {TOKEN}"
    assert sent["x-github-api-version"] == "2022-11-28"
    assert story.calls.last.request.headers["shortcut-token"] == "sc-invented"
    assert "authorization" not in story.calls.last.request.headers
    assert not waits.slept


RATES = [
    pytest.param(429, {"retry-after": "7"}, {}, 7, id="retry-after"),
    pytest.param(403, {"retry-after": "90"}, {}, 90, id="GitHub's secondary limit"),
    pytest.param(403, {"x-ratelimit-remaining": "0", "x-ratelimit-reset": str(int(NOW) + 42)}, {}, 42, id="reset"),
    pytest.param(429, {"x-ratelimit-remaining": "0", "x-ratelimit-reset": str(int(NOW) - 9)}, {}, 1, id="reset past"),
    pytest.param(429, {}, {}, 60, id="Shortcut names no time"),
    pytest.param(403, {}, {"message": "You have exceeded a secondary rate limit."}, 60, id="only the words say so"),
    pytest.param(429, {"retry-after": "Thu, 28 May 2026 20:26:50 GMT"}, {}, 10, id="a date"),
    pytest.param(429, {"retry-after": "soon"}, {}, 60, id="nonsense"),
]


@respx.mock
@pytest.mark.parametrize(("status", "headers", "body", "expected"), RATES)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_limited_rate_is_waited_for_and_the_call_made_again(
    github: ProviderClient,
    waits: Waits,
    method: str,
    status: int,
    headers: dict[str, str],
    body: dict[str, Any],
    expected: float,
) -> None:
    route = respx.route(method=method, url=f"{HERE}/x")
    route.side_effect = [httpx.Response(status, headers=headers, json=body), httpx.Response(200, json={})]

    await request(github, method, "/x", clock=waits.clock)

    assert waits.slept == [pytest.approx(expected, abs=1)]
    assert route.call_count == 2


@respx.mock
async def test_a_wait_that_nobody_names_is_doubled_each_time(github: ProviderClient, waits: Waits) -> None:
    respx.get(f"{HERE}/x").side_effect = [*[httpx.Response(429)] * 2, httpx.Response(200)]

    await request(github, "GET", "/x", clock=waits.clock)

    assert waits.slept == [60, 120]


@respx.mock
async def test_a_wait_past_all_patience_is_an_error_that_says_how_long(github: ProviderClient, waits: Waits) -> None:
    respx.get(f"{HERE}/x").respond(403, headers={"retry-after": "3600"}, json={"message": "slow down"})

    with pytest.raises(ProviderError, match="limits the rate; run it again in 1:00:00") as raised:
        await request(github, "GET", "/x", clock=waits.clock, patience=timedelta(minutes=5))

    assert raised.value.retry_after == timedelta(hours=1)
    assert not waits.slept


@respx.mock
async def test_patience_is_for_all_waits_of_a_call_together(github: ProviderClient, waits: Waits) -> None:
    respx.get(f"{HERE}/x").respond(429, headers={"retry-after": "40"})

    with pytest.raises(ProviderError):
        await request(github, "GET", "/x", clock=waits.clock, patience=timedelta(minutes=2))

    assert waits.slept == [40, 40, 40]


@respx.mock
@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(502),
        httpx.Response(500),
        httpx.ReadTimeout("timed out"),
        httpx.RemoteProtocolError("cut off"),
        httpx.ConnectError("refused"),
    ],
    ids=str,
)
async def test_what_is_harmless_to_repeat_is_repeated(
    github: ProviderClient, waits: Waits, answer: httpx.Response | Exception
) -> None:
    reading = respx.get(f"{HERE}/x")
    reading.side_effect = [answer, answer, answer, httpx.Response(200)]
    asking = respx.post(f"{HERE}/x")
    asking.side_effect = [answer, httpx.Response(202)]

    await request(github, "GET", "/x", clock=waits.clock)
    await request(github, "POST", "/x", clock=waits.clock, repeatable=True)

    assert (reading.call_count, asking.call_count) == (4, 2)
    assert len(waits.slept) == 4
    assert all(0 < seconds <= 8 for seconds in waits.slept)


@respx.mock
async def test_repeating_ends(github: ProviderClient, waits: Waits) -> None:
    route = respx.get(f"{HERE}/x").respond(503)

    with pytest.raises(ProviderError, match="GitHub has trouble; try again later") as raised:
        await request(github, "GET", "/x", clock=waits.clock)

    assert raised.value.status == 503
    assert route.call_count == 4


@respx.mock
async def test_what_may_have_been_done_is_not_repeated(github: ProviderClient, waits: Waits) -> None:
    failing = respx.post(f"{HERE}/failing").respond(500)
    silent = respx.post(f"{HERE}/silent").mock(side_effect=httpx.ReadTimeout("timed out"))

    with pytest.raises(ProviderError, match="500"):
        await request(github, "POST", "/failing", clock=waits.clock)
    with pytest.raises(ProviderError, match="Nobody knows whether it was done"):
        await request(github, "POST", "/silent", clock=waits.clock)

    assert (failing.call_count, silent.call_count) == (1, 1)


@respx.mock
async def test_what_was_never_sent_is_sent_again_whatever_it_is(github: ProviderClient, waits: Waits) -> None:
    route = respx.post(f"{HERE}/x")
    route.side_effect = [httpx.ConnectError("refused"), httpx.ConnectTimeout("no answer"), httpx.Response(201)]

    await request(github, "POST", "/x", clock=waits.clock)

    assert route.call_count == 3


@respx.mock
@pytest.mark.parametrize(
    ("status", "told"),
    [
        (401, "it does not accept WEBHOOKS_GITHUB_TOKEN: set one that is valid"),
        (403, "what WEBHOOKS_GITHUB_TOKEN holds may not do that; it needs admin:repo_hook"),
        (404, "there is no such thing, or WEBHOOKS_GITHUB_TOKEN may not see it; it needs admin:repo_hook"),
        (422, "it was refused as it stands"),
    ],
)
async def test_a_refusal_says_what_to_do_and_shows_no_token(
    github: ProviderClient, waits: Waits, status: int, told: str
) -> None:
    body = {"message": f"no: {TOKEN}\nreally", "errors": [{"field": "url", "code": "invalid"}, "odd"]}
    respx.get(f"{HERE}/x").respond(status, json=body)

    with pytest.raises(ProviderError) as raised:
        await request(github, "GET", "/x", clock=waits.clock, params={"secret": "query"})

    message = str(raised.value)
    assert told in message
    assert message.startswith(f"GitHub answered {status} to GET /api/v3/x (no: … really; url invalid; odd): ")
    assert TOKEN not in message
    assert "query" not in message
    assert raised.value.status == status
    assert not waits.slept


@respx.mock
async def test_a_moved_repository_is_followed_on_the_same_host(github: ProviderClient, waits: Waits) -> None:
    respx.get(f"{HERE}/repos/acme/old").respond(301, headers={"location": "/api/v3/repositories/5?page=2"})
    there = respx.get(f"{HERE}/repositories/5", params={"page": "2"}).respond(json=[])

    await request(github, "GET", "/repos/acme/old", clock=waits.clock, params={"page": 1})

    assert there.call_count == 1


@respx.mock
@pytest.mark.parametrize(
    "location", ["https://elsewhere.test/x", "http://github.test/api/v3/x", "//elsewhere.test/x", "https://[", ""]
)
async def test_the_token_goes_to_no_other_host(github: ProviderClient, waits: Waits, location: str) -> None:
    respx.get(f"{HERE}/x").respond(302, headers={"location": location})

    with pytest.raises(ProviderError, match="302"):
        await request(github, "GET", "/x", clock=waits.clock)


@respx.mock
async def test_redirects_end(github: ProviderClient, waits: Waits) -> None:
    route = respx.get(f"{HERE}/x").respond(302, headers={"location": f"{HERE}/x"})

    with pytest.raises(ProviderError, match="it is elsewhere now"):
        await request(github, "GET", "/x", clock=waits.clock)

    assert route.call_count == 4


@respx.mock
async def test_a_post_is_not_made_anew_as_another_one_elsewhere(github: ProviderClient, waits: Waits) -> None:
    respx.post(f"{HERE}/moved").respond(301, headers={"location": f"{HERE}/there"})
    respx.post(f"{HERE}/kept").respond(307, headers={"location": f"{HERE}/there"})
    there = respx.post(f"{HERE}/there").respond(202)

    with pytest.raises(ProviderError, match="301"):
        await request(github, "POST", "/moved", clock=waits.clock)
    await request(github, "POST", "/kept", clock=waits.clock)

    assert there.call_count == 1


@respx.mock
async def test_an_answer_that_is_not_json_is_not_the_providers(github: ProviderClient, waits: Waits) -> None:
    respx.get(f"{HERE}/x").respond(200, html="<h1>Sign in to the network</h1>")

    with pytest.raises(ProviderError, match="something that is not JSON"):
        decoded(await request(github, "GET", "/x", clock=waits.clock))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (Settings(), "set WEBHOOKS_GITHUB_TOKEN"),
        (Settings(github_token="ghp_secret\n"), "WEBHOOKS_GITHUB_TOKEN holds a character"),
        (Settings(github_token="ghp secret"), "WEBHOOKS_GITHUB_TOKEN holds a character"),
        (Settings(github_token="ghp_secreté"), "WEBHOOKS_GITHUB_TOKEN holds a character"),
    ],
)
async def test_a_token_that_cannot_be_one_is_told_and_not_shown(settings: Settings, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told) as raised:
        async with github_client(settings):
            pytest.fail("there is no token")
    assert "secret" not in str(raised.value)


def test_an_answer_nested_past_reading_is_an_error_that_says_so() -> None:
    answer = httpx.Response(200, content=b"[" * 200_000, request=httpx.Request("GET", "https://api.example/x"))
    with pytest.raises(ProviderError, match="not JSON"):
        decoded(answer)


async def test_a_refusal_nested_past_reading_is_an_error_as_any_other(github: ProviderClient, waits: Waits) -> None:
    with respx.mock:
        respx.get(f"{HERE}/x").respond(422, content=b"[" * 200_000)
        with pytest.raises(ProviderError, match="answered 422"):
            await request(github, "GET", "/x", clock=waits.clock)
