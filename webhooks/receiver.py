"""The public side: `POST /webhooks/{source}`. Count, verify, store, and only then answer.

This one endpoint takes the ASGI scope directly, because it is the one that has to be fast; everything else is
Starlette. Whatever a request holds, its answer is one of 200, 202, 400, 401, 404, 405, 413 and 503, with a small JSON
body, and never a computed signature.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from secrets import token_bytes
from typing import Any

import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from webhooks import observe
from webhooks.accept import Accepter
from webhooks.delivery import Delivery, Headers
from webhooks.errors import Refused, Unavailable
from webhooks.sources import Source
from webhooks.tunnel.probe import answer as probe_answer
from webhooks.tunnel.probe import is_probe

log = structlog.get_logger(__name__)

PREFIX = "/webhooks/"
RETRY_AFTER_S = 5
BODY_WITHIN_S = 60  # GitHub itself waits ten seconds for the answer
LINGER_S = 2.0
ENCODE = json.JSONEncoder(separators=(",", ":")).encode


class Receiver:
    """The ASGI application that deliveries are sent to.

    Args:
        sources: by name, who may send.
        secrets: by source, all secrets in force.
        accepter: stores what was verified.
        max_body_bytes: the largest body taken.
        now: unix seconds, against which signed times are held.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        secrets: Mapping[str, Sequence[str]],
        accepter: Accepter,
        *,
        max_body_bytes: int,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._sources = sources
        self._secrets = secrets
        self._accepter = accepter
        self._max_body_bytes = max_body_bytes
        self._now = now
        self._probe_key = token_bytes(32)
        other = Starlette(
            routes=[Route("/healthz", _healthz)], exception_handlers={404: _not_found, 405: _wrong_method}
        )
        # A redirect would be made of the request's own Host.
        other.router.redirect_slashes = False
        self._other: ASGIApp = other

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
            await self._other(scope, receive, send)
            return
        body = _Body(receive)
        outcome: tuple[int, dict[str, object]]
        try:
            outcome = await self._take(scope, body)
        except _Disconnected:
            return
        except asyncio.CancelledError:  # only a server that stops does not wait for the rest of a request
            outcome = 503, {"error": "stopping"}
        except Exception as error:  # whatever it was, the sender is asked to try again
            log.error("a request could not be handled", path=scope["path"], exc_info=error)
            outcome = 503, {"error": "unexpected"}
        status, answer = outcome
        await _answer(send, status, answer, unread=body if status in (400, 413) and not body.ended else None)

    async def _take(self, scope: Scope, sent: _Body) -> tuple[int, dict[str, object]]:
        name = scope["path"][len(PREFIX) :]
        source = self._sources.get(name)
        if source is None:
            return 404, {"error": "unknown_source"}
        if scope["method"] != "POST":
            return 405, {"error": "use POST"}
        try:
            body = await sent.read(self._max_body_bytes)
        except TimeoutError:
            return self._counted(name, 400, {"error": "body_too_slow", "limit_seconds": BODY_WITHIN_S})
        if body is None:
            return self._counted(name, 413, {"error": "body_too_large", "limit_bytes": self._max_body_bytes})
        started = time.perf_counter()
        headers: Headers = tuple((key.decode("latin-1"), value.decode("latin-1")) for key, value in scope["headers"])
        try:
            source.verify(headers, body, self._secrets.get(name, ()), self._now())
        except Refused as refused:
            observe.REJECTIONS.labels(name, refused.cause).inc()
            log.info("refused", source=name, cause=refused.cause, bytes=len(body))
            return self._counted(name, 401, {"error": refused.cause})
        if is_probe(body):
            return self._counted(name, 200, {"status": "answered", "probe": probe_answer(self._probe_key, body)})
        if source.answered(headers, body):
            return self._counted(name, 200, {"status": "answered"})
        delivery = Delivery(name, source.dedup_key(headers, body), source.keep(headers), body)
        try:
            accepted = await self._accepter.accept(delivery)
        except Unavailable as away:
            return self._counted(name, 503, {"error": "unavailable", "reason": str(away)})
        observe.ACCEPT_SECONDS.observe(time.perf_counter() - started)
        observe.DELIVERIES.labels(name, accepted.status).inc()
        log.debug(accepted.status, source=name, delivery=accepted.delivery, bytes=len(body))
        return 202 if accepted.status == "accepted" else 200, {
            "delivery": accepted.delivery,
            "status": accepted.status,
        }

    def _counted(self, source: str, status: int, answer: dict[str, object]) -> tuple[int, dict[str, object]]:
        outcomes = {200: "answered", 400: "too_slow", 401: "rejected", 413: "too_large", 503: "unavailable"}
        observe.DELIVERIES.labels(source, outcomes[status]).inc()
        return status, answer


class _Disconnected(Exception):
    """The sender went away before its body was whole: nothing of it is kept."""


class _Body:
    """The body of one request, counted as it comes, whatever its length was said to be."""

    def __init__(self, receive: Receive) -> None:
        self.ended = False
        self._receive = receive

    async def read(self, limit: int) -> bytes | None:
        """Return the body, or None as soon as it is longer than `limit` bytes."""
        first = await self._next()
        if self.ended:
            return first if len(first) <= limit else None
        body = bytearray(first)
        async with asyncio.timeout(BODY_WITHIN_S):
            while not self.ended and len(body) <= limit:
                body += await self._next()
        return bytes(body) if len(body) <= limit else None

    async def _next(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise _Disconnected
        self.ended = not message.get("more_body", False)
        body: bytes = message.get("body", b"")
        return body

    async def drop(self) -> None:
        """Read on for a moment: a connection closed on unread bytes is reset, and the answer lost (RFC 9112, 9.6)."""
        with suppress(TimeoutError, _Disconnected):
            async with asyncio.timeout(LINGER_S):
                while not self.ended:
                    await self._next()


async def _answer(send: Send, status: int, answer: dict[str, object], *, unread: _Body | None) -> None:
    body = ENCODE(answer).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 503:
        headers.append((b"retry-after", str(RETRY_AFTER_S).encode()))
    elif status == 405:
        headers.append((b"allow", b"POST"))
    elif unread is not None:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    if unread is not None:
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await unread.drop()
        body = b""
    await send({"type": "http.response.body", "body": body})


async def _healthz(request: Request) -> JSONResponse:
    return JSONResponse({"status": "ok"})


async def _not_found(request: Request, error: Any) -> JSONResponse:
    return JSONResponse({"error": "not_found"}, 404)


async def _wrong_method(request: Request, error: Any) -> JSONResponse:
    return JSONResponse({"error": "wrong_method"}, 405, headers=getattr(error, "headers", None))
