"""uvicorn's HTTP protocol, with bounds on what it holds before the application sees a request."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD_BYTES = 64 * 1024
# The smallest chunk, one byte with its length and two line ends, is six bytes.
MOST_FRAMING = 8
FIRST_BYTE_WITHIN_S = 60.0


class BoundedProtocol(HttpToolsProtocol):
    """Refuses with 400 a request whose head, or whose trailers and framing, are longer than 64 KiB and its body allows.

    httptools keeps headers and trailers, however long, until they are whole. What counts here is what came on the
    connection and was no body, from the read after the one that a request begins in: one read more may be held. A
    connection on which nothing comes at all is closed after a minute.
    """

    _others = 0
    _body = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(FIRST_BYTE_WITHIN_S, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        self._others += len(data)
        super().data_received(data)
        if self._others > MOST_HEAD_BYTES and self._others > MOST_HEAD_BYTES + MOST_FRAMING * self._body:
            self._refuse()

    def _refuse(self) -> None:
        if not self.transport.is_closing():
            self.send_400_response("Too much besides the body.")

    def on_message_begin(self) -> None:
        self._others = self._body = 0
        super().on_message_begin()
        # For an answer that somebody does not take: to close such a connection would wait for that.
        self.scope["webhooks.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]

    def on_body(self, body: bytes) -> None:
        self._others -= len(body)
        self._body += len(body)
        super().on_body(body)
