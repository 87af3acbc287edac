"""Reading captures from a file, from standard input, or from the files of a directory, one at a time."""

from __future__ import annotations

import asyncio
import io
import os
import stat
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from webhooks.captures import lines
from webhooks.captures.capture import Capture, payload, request
from webhooks.errors import ConfigurationError, UnknownName, Unreadable
from webhooks.near import there_are
from webhooks.sources import Source
from webhooks.sources.reading import read_json

CHUNK = 256 * 1024
ENDINGS = (".json", ".ndjson", ".http")
MOST_EVENTS = 1000
MARK = b"\xef\xbb\xbf"  # the byte order mark, which PowerShell writes before a text


async def captures(
    path: Path | None, sources: Mapping[str, Source], *, source: str | None = None, event: str | None = None
) -> AsyncGenerator[Capture]:
    """Yield the deliveries of a file in their order, and memory holds one of them.

    A file whose first line is one of `webhooks export` holds one a line. Any other that starts with `{` or `[` is a
    payload. The rest are captured requests. Of a directory those files are read, by name, that end in `.json`,
    `.ndjson` or `.http`.

    Args:
        path: the file or the directory; None: standard input.
        sources: by name, who may be the sender of a payload.
        source: the sender of a payload or a request; of an export, whose deliveries are read. In any case.
        event: what a payload says; of an export, a part of the event's name of those that are read, in any case.

    Raises:
        ConfigurationError: there is no such file, or nothing in it, or whose a payload is was not said.
        UnknownName: there is no such source, or nothing in the exports is of it or tells of such an event.
    """
    wanted = _Wanted(None if source is None else source.lower(), event)
    place = 0
    for each in _files(path):
        async with aclosing(_captures(each, sources, wanted, place)) as found:
            async for capture in found:
                place = capture.place
                yield capture
    if place == 0:
        wanted.check("standard input" if path is None else str(path))


@dataclass(slots=True)
class _Wanted:
    """The filters, and what the lines of exports hold, for whoever wants what is not among it."""

    source: str | None
    event: str | None
    sources: set[str] = field(default_factory=set[str])
    events: set[str] = field(default_factory=set[str])

    def passes(self, line: Capture) -> bool:
        self.sources.add(line.source)
        if len(self.events) < MOST_EVENTS:
            self.events.update((line.event or "").split(", "))
        return (self.source is None or line.source == self.source) and (
            self.event is None or self.event.lower() in (line.event or "").lower()
        )

    def check(self, name: str) -> None:
        """Say what is there; only called where nothing passed."""
        if self.source is not None and self.source not in self.sources:
            there = there_are(self.source, self.sources)
            raise UnknownName(f"{name} holds nothing of a source {self.source!r}; {there}")
        if self.event is not None and not any(self.event.lower() in event.lower() for event in self.events):
            there = there_are(self.event, self.events - {""})
            raise UnknownName(f"nothing in {name} has {self.event!r} in its event's name; {there}")


def _files(path: Path | None) -> list[Path | None]:
    if path is None or not path.is_dir():
        return [path]
    found = sorted(each for each in path.iterdir() if each.suffix in ENDINGS and each.is_file())
    if not found:
        raise ConfigurationError(f"{path} holds no file that ends in {', '.join(ENDINGS)}")
    return [*found]


async def _captures(
    path: Path | None, sources: Mapping[str, Source], wanted: _Wanted, before: int
) -> AsyncGenerator[Capture]:
    name = "standard input" if path is None else str(path)
    try:
        file = _standard_input() if path is None else path.open("rb")
    except OSError as error:
        raise ConfigurationError(f"{name} cannot be read: {error.strerror}") from None
    with file:
        async with aclosing(_chunks(file)) as chunks:
            first = await _first_line(chunks)
            text = first.removeprefix(MARK)
            if not text.strip():
                raise ConfigurationError(f"there is nothing in {name}")
            if not lines.is_line(text.lstrip().partition(b"\n")[0]):
                content = first + b"".join([chunk async for chunk in chunks])
                yield _whole(content, path, name, sources, wanted, before + 1)
                return

            number = 0
            async for line, ended in _lines(text, chunks):
                number += 1
                if line.strip():
                    before += 1
                    capture = lines.read(line, place=before, name=f"line {number} of {name}", ended=ended)
                    if capture.fault is not None or wanted.passes(capture):
                        yield capture


def _whole(
    content: bytes, path: Path | None, name: str, sources: Mapping[str, Source], wanted: _Wanted, place: int
) -> Capture:
    if wanted.source is not None and wanted.source not in sources:
        raise UnknownName(f"there is no source {wanted.source!r}; {there_are(wanted.source, sources)}")
    text = content.removeprefix(MARK)
    if text.lstrip()[:1] not in (b"{", b"["):
        return request(text, place=place, name=name, source=wanted.source)
    if wanted.source is None:
        try:
            read_json(content)
        except Unreadable as error:
            return Capture(place=place, name=name, fault=f"it cannot be read as a payload: {error}")
        known = ", ".join(sources) or "none"
        raise ConfigurationError(f"{name} is a payload alone: say whose it is with --source; there are: {known}")
    sender, stem = sources[wanted.source], "" if path is None else path.stem
    return payload(content, place=place, name=name, stem=stem, source=sender, event=wanted.event)


def _standard_input() -> BinaryIO:
    # A copy, so that leaving it closes nothing of the process's.
    try:
        return os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    except (io.UnsupportedOperation, ValueError):  # not a file of the system's, as under a test
        return io.BytesIO(sys.stdin.buffer.read())


async def _chunks(file: BinaryIO) -> AsyncGenerator[bytes]:
    """Yield what is in a file; a pipe is read so that everything else goes on while nothing comes."""
    if isinstance(file, io.BytesIO) or stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        while chunk := file.read(CHUNK):
            yield chunk
        return
    reader = asyncio.StreamReader(limit=CHUNK)
    protocol = asyncio.StreamReaderProtocol(reader)
    same = os.dup(file.fileno())  # the transport closes its own at the end
    try:
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, file)
        try:
            while chunk := await reader.read(CHUNK):
                yield chunk
        finally:
            transport.close()
            # Whoever else has this pipe or terminal open shares the setting.
            os.set_blocking(same, True)
    finally:
        os.close(same)


async def _first_line(chunks: AsyncIterator[bytes]) -> bytes:
    """Read as far as the end of the first line that is not empty, and perhaps further."""
    read = bytearray()
    async for chunk in chunks:
        read += chunk
        if b"\n" in chunk and b"\n" in read.removeprefix(MARK).lstrip():
            break
    return bytes(read)


async def _lines(first: bytes, chunks: AsyncIterator[bytes]) -> AsyncIterator[tuple[bytes, bool]]:
    """Yield each line, and whether it had a line end."""
    *whole, rest = first.split(b"\n")
    for line in whole:
        yield line, True
    pieces = [rest]
    async for chunk in chunks:
        *whole, rest = chunk.split(b"\n")
        for line in whole:
            yield b"".join([*pieces, line]), True
            pieces = []
        pieces.append(rest)
    yield b"".join(pieces), False
