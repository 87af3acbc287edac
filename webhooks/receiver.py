"""The public side: `POST /webhooks/{source}`. Count, verify, store, and only then answer.

This one endpoint takes the ASGI scope directly, because it is the one that has to be fast; everything else is
Starlette. Whatever a request holds, its answer is one of 200, 202, 400, 401, 404, 405, 413 and 503, with a small JSON
body, and never a computed signature. What was refused is kept, after its answer was sent, for `webhooks rejections`.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
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
from webhooks.refusals import Refusal, Refusals
from webhooks.sources import Source
from webhooks.tunnel.probe import answer as probe_answer
from webhooks.tunnel.probe import is_probe

log = structlog.get_logger(__name__)

PREFIX = "/webhooks/"
HEALTH = "/healthz"
WRONG_TOLD_EVERY_S = 60.0
RETRY_AFTER_S = 5
BODY_WITHIN_S = 60  # GitHub itself waits ten seconds for the answer
LINGER_S = 2.0
# So much of a body is read whatever else is being read: nearly every delivery is shorter.
FREE_BYTES = 64 * 1024
UNVERIFIED_BYTES = 256 * 1024 * 1024
ENCODE = json.JSONEncoder(separators=(",", ":")).encode


_Outcome = tuple[int, dict[str, object], Refusal | None]


class Receiver:
    """The ASGI application that deliveries are sent to.

    Args:
        sources: by name, who may send.
        secrets: by source, all secrets in force.
        accepter: stores what was verified.
        max_body_bytes: the largest body taken.
        refusals: keeps what was refused; None: nothing is kept of it.
        unverified_bytes: how much memory the bodies take together that are being read; past it, one that is longer
            than 64 KiB is answered 503.
        now: unix seconds, against which signed times are held.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        secrets: Mapping[str, Sequence[str]],
        accepter: Accepter,
        *,
        max_body_bytes: int,
        refusals: Refusals | None = None,
        unverified_bytes: int = UNVERIFIED_BYTES,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._sources = sources
        self._secrets = secrets
        self._accepter = accepter
        self._max_body_bytes = max_body_bytes
        self._refusals = refusals
        self._room = _Room(unverified_bytes)
        self._now = now
        self._probe_key = token_bytes(32)
        self._wrong_told_at = -math.inf
        other = Starlette(routes=[Route(HEALTH, _healthz)], exception_handlers={404: _not_found, 405: _wrong_method})
        # A redirect would be made of the request's own Host.
        other.router.redirect_slashes = False
        self._other: ASGIApp = other

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
            if scope["type"] == "http" and scope["path"] != HEALTH:
                self._wrong(scope["path"])
            await self._other(scope, receive, send)
            return
        body = _Body(receive, self._room)
        try:
            outcome: _Outcome
            try:
                outcome = await self._take(scope, body)
            except _Disconnected:
                return
            except asyncio.CancelledError:  # only a server that stops does not wait for the rest of a request
                outcome = 503, {"error": "stopping"}, None
            except Exception as error:  # whatever it was, the sender is asked to try again
                log.error("a request could not be handled", path=scope["path"], exc_info=error)
                outcome = 503, {"error": "unexpected"}, None
            status, answer, refused = outcome
            await _answer(send, status, answer, unread=body if body.given_up else None)
            if refused is not None and self._refusals is not None:
                await self._keep(refused, self._refusals)
        finally:
            body.free()

    async def _take(self, scope: Scope, sent: _Body) -> _Outcome:
        # With a slash at its end, as some proxies and forms write it.
        name = scope["path"][len(PREFIX) :].removesuffix("/")
        source = self._sources.get(name)
        if source is None:
            self._wrong(scope["path"])
            return 404, {"error": "unknown_source"}, None
        if scope["method"] != "POST":
            return 405, {"error": "use POST"}, None
        headers: Headers = tuple((key.decode("latin-1"), value.decode("latin-1")) for key, value in scope["headers"])
        try:
            body = await sent.read(self._max_body_bytes)
        except TimeoutError:
            refused = Refusal(name, "body_too_slow", headers, None, sent.size, self._now(), _sender(scope))
            answer: dict[str, object] = {"error": "body_too_slow", "limit_seconds": BODY_WITHIN_S}
            return self._counted(name, "too_slow", 400, answer, refused)
        except _NoRoom:
            return self._counted(name, "no_room", 503, {"error": "too_many_long_bodies"})
        if body is None:
            refused = Refusal(name, "body_too_large", headers, None, sent.size, self._now(), _sender(scope))
            answer = {"error": "body_too_large", "limit_bytes": self._max_body_bytes}
            return self._counted(name, "too_large", 413, answer, refused)
        started = time.perf_counter()
        now = self._now()
        try:
            source.verify(headers, body, self._secrets.get(name, ()), now)
        except Refused as error:
            observe.REJECTIONS.labels(name, error.cause).inc()
            log.info("refused", source=name, cause=error.cause, bytes=len(body))
            refused = Refusal(name, error.cause, headers, body, len(body), now, _sender(scope))
            return self._counted(name, "rejected", 401, {"error": error.cause}, refused)
        sent.free()
        if is_probe(body):
            return self._counted(name, "answered", 200, {"probe": probe_answer(self._probe_key, body)})
        if source.answered(headers, body):
            return self._counted(name, "answered", 200, {"status": "answered"})
        delivery = Delivery(name, source.dedup_key(headers, body), source.keep(headers), body)
        try:
            accepted = await self._accepter.accept(delivery)
        except Unavailable as away:
            return self._counted(name, "unavailable", 503, {"error": "unavailable", "reason": str(away)})
        observe.ACCEPT_SECONDS.observe(time.perf_counter() - started)
        observe.DELIVERIES.labels(name, accepted.status).inc()
        log.debug(accepted.status, source=name, delivery=accepted.delivery, bytes=len(body))
        status = 202 if accepted.status == "accepted" else 200
        return status, {"delivery": accepted.delivery, "status": accepted.status}, None

    def _wrong(self, path: str) -> None:
        """Count a request for a path that is nobody's, and say once a minute which one and what was meant."""
        observe.WRONG_PATHS.inc()
        now = time.monotonic()
        if now < self._wrong_told_at + WRONG_TOLD_EVERY_S:
            return
        self._wrong_told_at = now
        log.warning("asked for a path that is no source's", path=path[:200], meant=meant(path, self._sources))

    def _counted(
        self, source: str, outcome: str, status: int, answer: dict[str, object], refused: Refusal | None = None
    ) -> _Outcome:
        observe.DELIVERIES.labels(source, outcome).inc()
        return status, answer, refused

    async def _keep(self, refused: Refusal, refusals: Refusals) -> None:
        try:
            await refusals.keep(refused)
        except asyncio.CancelledError:
            pass  # its sender was answered: nothing is owed any more
        except Exception as error:  # a rejection that cannot be kept is no reason to close a connection
            log.error("a refused request could not be kept", source=refused.source, exc_info=error)


def _sender(scope: Scope) -> str | None:
    client = scope.get("client")
    return client[0] if client else None


def meant(path: str, sources: Collection[str]) -> str | None:
    """Guess which source's path was meant: behind a prefix, with slashes too many, in another letter case.

    Args:
        path: what was asked for.
        sources: their names.

    Returns:
        The right path; None where nothing is like it.
    """
    parts = [part for part in path.casefold().split("/") if part not in ("", "webhooks")]
    by_name = {name.casefold(): name for name in sources}
    named = [by_name[part] for part in parts if part in by_name]
    if not named and parts:
        near = get_close_matches(parts[-1], by_name, n=1)
        named = [by_name[name] for name in near]
    return f"{PREFIX}{named[-1]}" if named else None


class _Room:
    """The memory that bodies may take which are still being read."""

    def __init__(self, most: int) -> None:
        self.left = most


class _Disconnected(Exception):
    """The sender went away before its body was whole: nothing of it is kept."""


class _NoRoom(Exception):
    """The bodies that are being read take all the memory there is for them."""


class _Body:
    """The body of one request, counted as it comes, whatever its length was said to be.

    Attributes:
        ended: whether all of it was read.
        given_up: whether the rest of it is of no use.
        size: how much of it was read.
    """

    __slots__ = ("_held", "_receive", "_room", "ended", "given_up", "size")

    def __init__(self, receive: Receive, room: _Room) -> None:
        self.ended = self.given_up = False
        self.size = self._held = 0
        self._receive = receive
        self._room = room

    async def read(self, limit: int) -> bytes | None:
        """Return the body, or None as soon as it is longer than `limit` bytes.

        Raises:
            TimeoutError: it does not end.
            _NoRoom: it is long, and so are many others just now.
        """
        first = await self._next()
        self.size = len(first)
        if self.ended:
            return first if self.size <= limit else None
        body = bytearray(first)
        try:
            async with asyncio.timeout(BODY_WITHIN_S):
                while not self.ended and self.size <= limit:
                    self._hold()
                    body += await self._next()
                    self.size = len(body)
        except (TimeoutError, _NoRoom):
            self.given_up = True
            self.free()
            raise
        if self.size > limit:
            self.given_up = not self.ended
            self.free()
            return None
        return bytes(body)

    def _hold(self) -> None:
        more = self.size - FREE_BYTES - self._held
        if more > 0:
            if more > self._room.left:
                raise _NoRoom
            self._room.left -= more
            self._held += more

    def free(self) -> None:
        """Give back the room that the body took; from now on somebody else counts it, or it is gone."""
        self._room.left += self._held
        self._held = 0

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
    if unread is not None:
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
