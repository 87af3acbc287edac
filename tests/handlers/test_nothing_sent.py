"""A connection that is refused sent nothing: the effect certainly did not happen, and the next attempt calls again."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest
from consumers import quick, served
from gates import a_gate, due, opened, sql, status_of
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from handlers.calls import call
from webhooks import NotDone, Pool

DOCUMENT = (Path(__file__).parents[2] / "docs" / "escalations.md").read_text()
Charge: TypeAlias = Callable[[str, int, str], Awaitable[dict[str, int]]]


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[Pool]:
    async with Pool.open(database_url, settings=quick()) as pool:
        yield pool


@pytest.fixture
def closed() -> Iterator[str]:
    """Where nobody listens; the port is held, so that nobody comes to either."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}/"


def documented() -> Charge:
    """The function that docs/escalations.md shows."""
    [code] = [block for block in re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL) if "NOTHING_SENT" in block]
    found: dict[str, Any] = {}
    exec(code, found)  # noqa: S102
    charge: Charge = found["charge"]
    return charge


async def ours(url: str, amount: int, key: str) -> dict[str, int]:
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        answer: dict[str, int] = await call(http, "POST", "/", json={"amount": amount}, headers={"Key": key})
        return answer


WAYS = pytest.mark.parametrize("charge", [documented(), ours], ids=["as documented", "by our client"])


async def attempt(pool: Pool, charge: Charge, url: str) -> str:
    """One attempt at a phase that must not charge twice; what the row is then."""

    async def made() -> dict[str, int]:
        return await charge(url, 5, "key")

    await due(pool, 1)
    with suppress(NotDone, httpx.HTTPError):
        async with gate.claim(pool, "drafting", 1) as claim:
            assert claim is not None
            await claim.complete(patch=str(await claim.once("charge", made)))
    return await status_of(pool, 1)


gate = a_gate()


async def effect(pool: Pool) -> tuple[str, int, int]:
    [row] = await sql(pool, "SELECT state, calls, not_done FROM effects")
    return row["state"], row["calls"], row["not_done"]


@WAYS
@pytest.mark.parametrize("url", ["closed", "http://nobody.invalid/", "https://closed", "nonsense://closed/"])
async def test_an_effect_that_sent_nothing_is_simply_called_again(
    pool: Pool, charge: Charge, url: str, closed: str
) -> None:
    await opened(pool, gate, 1)
    where = url.replace("https://closed", closed.replace("http:", "https:")) if "//" in url else closed
    assert await attempt(pool, charge, where) == "clarified"
    assert await effect(pool) == ("failed", 1, 1)

    async def take(request: Request) -> JSONResponse:
        return JSONResponse({"charged": (await request.json())["amount"]})

    async with served(Starlette(routes=[Route("/", take, methods=["POST"])])) as port:
        assert await attempt(pool, charge, f"http://127.0.0.1:{port}/") == "drafted"
    assert await effect(pool) == ("done", 2, 1)


@WAYS
async def test_a_proxy_that_lets_nothing_through_sent_nothing(
    pool: Pool, charge: Charge, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server:
        proxy = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        if charge is ours:

            async def charge(url: str, amount: int, key: str) -> dict[str, int]:
                async with httpx.AsyncClient(base_url=url, proxy=proxy) as http:
                    answer: dict[str, int] = await call(http, "POST", "/", json={})
                    return answer

        else:
            monkeypatch.setenv("HTTPS_PROXY", proxy)
        await opened(pool, gate, 1)
        assert await attempt(pool, charge, "https://bank.example/") == "clarified"
    assert await effect(pool) == ("failed", 1, 1)


@WAYS
async def test_a_request_that_was_sent_may_have_happened(pool: Pool, charge: Charge) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server:
        await opened(pool, gate, 1)
        where = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        assert await attempt(pool, charge, where) == "clarified"
        assert await effect(pool) == ("intended", 1, 0)
        await sql(pool, "UPDATE effects SET call_until = now() - interval '1 s'")
        assert await attempt(pool, charge, where) == "escalated"
    assert await effect(pool) == ("intended", 1, 0)


@pytest.mark.parametrize("status", [301, 302, 307, 308])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_redirect_on_the_same_host_is_followed_as_the_request_was(status: int, method: str) -> None:
    seen: list[tuple[str, str, bytes]] = []

    async def old(request: Request) -> JSONResponse:
        return JSONResponse({}, status, headers={"location": "/new"})

    async def new(request: Request) -> JSONResponse:
        seen.append((request.method, request.url.query, await request.body()))
        return JSONResponse({"ok": 1})

    methods = ["GET", "POST"]
    app = Starlette(routes=[Route("/old", old, methods=methods), Route("/new", new, methods=methods)])
    async with served(app) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
        assert await call(http, method, "/old", params={"page": "2"}, content=b"x") == {"ok": 1}
    assert seen == [(method, "page=2", b"x")]


@pytest.mark.parametrize("location", ["http://127.0.0.1:1/new", "https://other.example/new", "http://[", None])
async def test_no_other_redirect_is_followed_and_none_for_ever(location: str | None) -> None:
    asked = 0

    async def old(request: Request) -> JSONResponse:
        nonlocal asked
        asked += 1
        return JSONResponse({}, 307, headers={"location": "/old" if location is None else location})

    app = Starlette(routes=[Route("/old", old, methods=["POST"])])
    async with served(app) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
        with pytest.raises(NotDone, match="answered 307"):
            await call(http, "POST", "/old")
    assert asked == (4 if location is None else 1)
