"""uvicorn's HTTP protocol with bounds: on a head, on what waits on a connection, on silence, and on connections.

A connection costs what it may cost before anybody has verified anything: one read that waits, a kilobyte of it parsed,
and the time-outs of `Limits`. Whoever sends faster than it is answered is not read for a while.
"""

from __future__ import annotations

import asyncio
import math
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httptools
import structlog
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

log = structlog.get_logger(__name__)

MOST_HEAD_BYTES = 64 * 1024
# The smallest chunk, one byte with its length and two line ends, is six bytes.
MOST_FRAMING = 8
# So much is parsed at once besides a body of known length: it may hold dozens of requests, each a kilobyte of memory.
PARSED_AT_ONCE = 1024
CHUNKED_AT_ONCE = 4 * 1024
TELL_EVERY_S = 60.0
MOST_FILES = 65_536
# Files for everything but the receiver's connections: the database, the control plane, logs, a helper's pipes.
OTHER_FILES = 512


@dataclass(frozen=True, slots=True)
class Limits:
    """What one server's connections may take.

    Args:
        connections: how many there may be; past it the oldest goes that is not in the middle of a request.
        waiting_bytes: what all of them together may have sent ahead of the answers they were given.
        first_byte_s: seconds until a new connection must have sent something.
        head_s: seconds from a request's first byte to the end of its head.
        keep_alive_s: seconds that a connection may rest between two requests.
        rest_s: seconds for the rest of a body whose request is answered already.
        untaken_s: seconds that an answer may wait for somebody who does not read it.
        answers_half_closed: whether a sender that closed its side is answered. Where answers are streams that end when
            their reader leaves, it is not: leaving looks the same.
    """

    connections: int = 512
    waiting_bytes: int = 32 * 1024 * 1024
    first_byte_s: float = 60.0
    head_s: float = 30.0
    keep_alive_s: float = 75.0
    rest_s: float = 60.0
    untaken_s: float = 60.0
    answers_half_closed: bool = True


def raise_file_limit() -> int:
    """Let this process open as many files as it may, at most 65,536; return how many connections there is room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    files = MOST_FILES if soft == resource.RLIM_INFINITY else min(soft, MOST_FILES)
    return max(files - OTHER_FILES, files // 4)


async def tell_of_full_files() -> None:
    """Say, once a minute at most, that no file can be opened: a connection that cannot be accepted is closed unseen.

    uvloop accepts it with a file that it keeps for this, closes it, and tells nobody.
    """
    told_at = -math.inf
    while True:
        await asyncio.sleep(1)
        try:
            os.close(os.dup(2))
        except OSError as error:
            if time.monotonic() - told_at >= TELL_EVERY_S:
                told_at = time.monotonic()
                files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
                log.error(
                    "new connections cannot be accepted: raise the limit of open files (ulimit -n)",
                    error=error.strerror,
                    limit=files,
                )


@dataclass(slots=True)
class Connections:
    """The connections of one server.

    Attributes:
        idle: those without a request whose head is whole, the oldest first.
        sending: those whose request's body is not whole, the oldest first.
        count: how many there are.
        waiting: bytes that wait on all of them.
        leaving: whether the process is about to stop, so that every answer closes its connection.
    """

    limits: Limits
    idle: dict[BoundedProtocol, None] = field(default_factory=dict["BoundedProtocol", None])
    sending: dict[BoundedProtocol, None] = field(default_factory=dict["BoundedProtocol", None])
    count: int = 0
    waiting: int = 0
    turned_away: int = 0
    leaving: bool = False

    def protocol(self, **arguments: Any) -> BoundedProtocol:
        """Make the protocol of a new connection, as uvicorn asks for it."""
        return BoundedProtocol(self, **arguments)

    def opened(self, connection: BoundedProtocol) -> None:
        """Count a new connection, and let the oldest go that does least where there are too many."""
        self.count += 1
        self.idle[connection] = None
        if self.count > self.limits.connections:
            oldest = next(iter(self.idle))
            if oldest is connection and self.sending:
                oldest = next(iter(self.sending))
            self._turn_away(oldest)

    def _turn_away(self, connection: BoundedProtocol) -> None:
        if self.turned_away % 1000 == 0:
            log.warning(
                "too many connections: the oldest that wait for nothing are closed",
                most=self.limits.connections,
                closed_before=self.turned_away,
            )
        self.turned_away += 1
        connection.transport.abort()
        self.closed(connection)

    def closed(self, connection: BoundedProtocol) -> None:
        """Forget a connection, once."""
        if not connection.counted:
            return
        connection.counted = False
        self.count -= 1
        self.idle.pop(connection, None)
        self.sending.pop(connection, None)


class _Flow(FlowControl):
    """Asks the protocol, not the transport, to stop and to go on: what was read already waits with it."""

    def __init__(self, transport: asyncio.Transport, resumed: Callable[[], None]) -> None:
        super().__init__(transport)
        self._resumed = resumed

    def pause_reading(self) -> None:
        self.read_paused = True

    def resume_reading(self) -> None:
        self.read_paused = False
        self._resumed()


class BoundedProtocol(HttpToolsProtocol):
    """One connection.

    What comes is parsed a little at a time, and nothing is while a request waits for its answer, so that requests sent
    ahead cost the bytes that were read and no more; while bytes wait the connection is not read. Upgrades are ignored
    (RFC 9110, 7.8): the request is read anew without the offer, and its body belongs to it. Trailers are dropped, and
    so is what follows a request that closes its connection.

    Attributes:
        counted: whether it is one of its server's `Connections`.
    """

    def __init__(self, connections: Connections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.counted = True
        self._all = connections
        self._limits = connections.limits
        self._unread = b""
        self._parsing = False
        self._reading = True
        self._ended = False  # the sender has closed its side
        self._in_head = self._in_body = False
        self._upgrade = False
        self._body_left = 0
        self._chunked = False
        self._running: RequestResponseCycle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waits_for: str | None = None
        self._untaken: asyncio.TimerHandle | None = None
        self._others = 0
        self._body = 0

    # ---- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self._go_on)
        self._all.opened(self)
        self._wait_for("its first byte", self._limits.first_byte_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.closed(self)
        self._forget_unread()
        self._wait_for(None)
        self._taken()
        self.pipeline.clear()
        if self._running is not None:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        self._ended = True
        return self._limits.answers_half_closed and self._may_answer()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._untaken is None:
            self._untaken = self.loop.call_later(self._limits.untaken_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._taken()

    def _taken(self) -> None:
        if self._untaken is not None:
            self._untaken.cancel()
            self._untaken = None

    @property
    def _last(self) -> RequestResponseCycle | None:
        """The request whose head came last."""
        return self.cycle

    def _busy(self) -> bool:
        """Whether a request is being answered."""
        last = self._last
        return bool(self.pipeline) or (last is not None and not last.response_complete)

    def _may_answer(self) -> bool:
        """Whether there is, after the sender's end, a whole request that is owed its answer."""
        if not self._busy():
            return False
        running = self._running
        return bool(self._unread) or running is None or not running.more_body or running.response_complete

    def _wait_for(self, what: str | None, seconds: float = 0.0) -> None:
        """Close the connection after a time, counted from when this began to be waited for; None: for nothing."""
        if what == self._waits_for:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._waits_for = what
        self._timer = None if what is None else self.loop.call_later(seconds, self._too_late)

    def _too_late(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()

    # ---- what comes

    def data_received(self, data: bytes) -> None:
        self._all.waiting += len(data)
        self._unread = self._unread + data if self._unread else data
        self._go_on()

    def _go_on(self) -> None:
        """Parse what may be parsed, read on if nothing waits, and see what is waited for now."""
        if self._parsing or self.transport.is_closing():
            return
        self._parsing = True
        try:
            while self._unread and not self._blocked():
                size = self._body_left or (CHUNKED_AT_ONCE if self._chunked else PARSED_AT_ONCE)
                piece, self._unread = self._unread[:size], self._unread[size:]
                self._all.waiting -= len(piece)
                self._parse(piece)
                if self.transport.is_closing():
                    break
        finally:
            self._parsing = False
        if self.transport.is_closing() or self._is_last():
            self._forget_unread()  # nothing that follows is answered
        elif self._all.waiting > self._limits.waiting_bytes and self._unread:
            log.warning("too much was sent ahead of its answers: a connection is closed", bytes=len(self._unread))
            self.transport.abort()
            return
        self._read(not self._unread)
        self._look()

    def _blocked(self) -> bool:
        """Whether nothing more may be parsed: a request waits for its answer, or its body for being taken."""
        if self.flow.read_paused or self.pipeline:
            return True
        last = self._last
        return last is not None and not last.more_body and not last.response_complete

    def _is_last(self) -> bool:
        """Whether the request that came last closes the connection, and is whole."""
        last = self._last
        return last is not None and not last.keep_alive and not self._in_body and not self._in_head

    def _read(self, reading: bool) -> None:
        if reading != self._reading and not self.transport.is_closing():
            self._reading = reading
            if reading:
                self.transport.resume_reading()
            else:
                self.transport.pause_reading()

    def _forget_unread(self) -> None:
        self._all.waiting -= len(self._unread)
        self._unread = b""

    def _look(self) -> None:
        """Set the time-out that holds now."""
        if self._ended and not self._may_answer():
            self.transport.close()
        if self.transport.is_closing() or self._busy():
            self._wait_for(None)
        elif self._in_head:
            self._wait_for("its head", self._limits.head_s)
        elif self._in_body:
            self._wait_for("the rest of its body", self._limits.rest_s)
        elif self._waits_for != "its first byte":
            self._wait_for("its next request", self._limits.keep_alive_s)

    def _parse(self, piece: bytes) -> None:
        self._others += len(piece)
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            self._parse_without_the_offer(piece[upgrade.args[0] :])
            return
        except httptools.HttpParserError:
            self._refuse("Invalid HTTP request received.")
            return
        if self._others > MOST_HEAD_BYTES and self._others > MOST_HEAD_BYTES + MOST_FRAMING * self._body:
            self._refuse("Too much besides the body.")

    def _parse_without_the_offer(self, rest: bytes) -> None:
        """Parse the head again without what offers another protocol, and go on with what follows it."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse("Nothing can be connected to from here.")
            return
        lines = [b"%s %s HTTP/%s" % (method, self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                tokens = (token.strip() for token in value.split(b","))
                value = b", ".join(token for token in tokens if token.lower() not in (b"upgrade", b"http2-settings"))
            if name not in (b"upgrade", b"http2-settings") and not (name == b"connection" and not value):
                lines.append(name + b": " + value)
        self.parser = httptools.HttpRequestParser(self)
        self._upgrade = False
        self._parse(b"\r\n".join([*lines, b"", b""]))
        if rest and not self.transport.is_closing():
            self._all.waiting += len(rest)
            self._unread = rest + self._unread

    def _refuse(self, why: str) -> None:
        if not self.transport.is_closing():
            log.info("a request cannot be read", reason=why)
            self.send_400_response(why)

    # ---- what the parser finds

    def on_message_begin(self) -> None:
        self._others = self._body = 0
        self._in_head, self._in_body = True, False
        super().on_message_begin()
        # For an answer that somebody does not take: to close such a connection would wait for that.
        self.scope["webhooks.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # a trailer belongs to no head
            super().on_header(name, value.rstrip(b" \t"))

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            self._upgrade = True
            return
        self._in_head, self._in_body = False, True
        self._chunked, self._body_left = False, 0
        for name, value in self.headers:
            if name == b"transfer-encoding":
                self._chunked = True
            elif name == b"content-length":
                self._body_left = int(value)
        if self._chunked:
            self._body_left = 0
        self._all.idle.pop(self, None)
        if self.counted:
            self._all.sending[self] = None
        super().on_headers_complete()
        if self._all.leaving:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        if self._upgrade:
            return
        self._others -= len(body)
        self._body += len(body)
        self._body_left -= min(len(body), self._body_left)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._upgrade:
            return
        self._in_body = self._chunked = False
        self._body_left = 0
        self._all.sending.pop(self, None)
        super().on_message_complete()
        self._rest()

    def _rest(self) -> None:
        """Count it among those that may be closed, once nothing is under way."""
        if self.counted and not self._in_body and not self._busy():
            self._all.idle[self] = None

    # ---- what is answered

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        self._running = cycle
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())  # type: ignore[arg-type]
        self._rest()
        self.flow.resume_reading()
