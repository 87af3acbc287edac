"""Where a tunnel goes on: the cursor of the last delivery that is done with, kept on disk.

It is written beside the posting, always the newest one that is known, so that the disk holds nothing up. What is lost
by a kill is the last moment of it: those deliveries are posted again, and the inbox knows them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import threading
from collections.abc import AsyncGenerator, Collection, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeGuard

from webhooks.errors import ConfigurationError, WebhooksError
from webhooks.sources.reading import mapping

WRITE_EVERY_S = 0.1
MOST_OF_A_CURSOR = 1024

if sys.platform != "win32":
    import fcntl


def is_cursor(text: object) -> TypeGuard[str]:
    """Say whether something can be a cursor: whoever made it, it goes into an address again."""
    return isinstance(text, str) and 0 < len(text) <= MOST_OF_A_CURSOR and text.isascii() and text.isprintable()


class Bookmark:
    """The place of one tunnel, which is a remote, some sources and a target.

    Args:
        path: the file.
        about: what is written beside the cursor, for a person who looks.

    Attributes:
        path: the file.
        cursor: the cursor; None where none was kept yet.
        kept_at: when it was, as text.
    """

    def __init__(self, path: Path, about: dict[str, object]) -> None:
        self.path = path
        self.cursor: str | None = None
        self.kept_at: str | None = None
        self._about = about
        self._written: str | None = None
        self._changed = asyncio.Event()
        self._failure: OSError | None = None
        self._turn = threading.Lock()
        self._read()

    def _read(self) -> None:
        try:
            found = mapping(json.loads(self.path.read_bytes()))
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigurationError(
                f"{self.path} cannot be read ({error}): remove it, and say with --since where to go on"
            ) from None
        cursor, kept_at = found.get("cursor"), found.get("kept_at")
        if not is_cursor(cursor):
            raise ConfigurationError(f"{self.path} holds no cursor: remove it, and say with --since where to go on")
        self.cursor = self._written = cursor
        self.kept_at = kept_at if isinstance(kept_at, str) else None

    def keep(self, cursor: str) -> None:
        """Take note of a cursor; it is on disk a moment later.

        Raises:
            ConfigurationError: an earlier one could not be written.
        """
        if self._failure is not None:
            raise _not_kept(self.path, self._failure)
        self.cursor = cursor
        self._changed.set()

    async def run(self) -> None:
        """Write what changes, until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await asyncio.to_thread(self.write)
            except OSError as error:
                self._failure = error
            # The receiver's database waits for the same disk.
            await asyncio.sleep(WRITE_EVERY_S)

    def write(self) -> None:
        """Write the newest cursor, so that the file is whole at every moment.

        Raises:
            OSError: it cannot be written.
        """
        with self._turn:
            cursor = self.cursor
            if cursor is None or cursor == self._written:
                return
            kept = {**self._about, "cursor": cursor, "kept_at": datetime.now(UTC).isoformat(timespec="seconds")}
            _replace(self.path, json.dumps(kept, indent=2) + "\n")
            self._written = cursor


def _replace(path: Path, text: str) -> None:
    draft = path.with_suffix(".new")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    with suppress(OSError):  # not every system lets a directory be opened
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


@asynccontextmanager
async def bookmark(home: Path, url: str, sources: Collection[str], to: str) -> AsyncGenerator[Bookmark]:
    """Open the place of a tunnel, for one process at a time.

    Args:
        home: the directory of `WEBHOOKS_HOME`.
        url: where deliveries come from.
        sources: which; none stands for all.
        to: where they go.

    Raises:
        ConfigurationError: another process has it open, or it cannot be read, made or written.
    """
    about: dict[str, object] = {"url": url, "sources": sorted(sources), "to": to}
    name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    directory = _made(home / "tunnel")
    with _alone(directory / f"{name}.lock", f"{url} to {to}"):
        kept = Bookmark(directory / f"{name}.json", about)
        writing = asyncio.create_task(kept.run(), name="webhooks-bookmark")
        try:
            yield kept
        finally:
            writing.cancel()
            # A write under way goes on in its thread; this one comes after it.
            await asyncio.gather(writing, return_exceptions=True)
            ending = sys.exception()
            try:
                await asyncio.to_thread(kept.write)
            except OSError as error:
                told = _not_kept(kept.path, error)
                if not isinstance(ending, WebhooksError):
                    raise told from None
                if str(told) != str(ending):  # which it is where the tunnel ends for this very reason
                    ending.add_note(str(told))  # what the tunnel ends for must not be hidden


def _not_kept(path: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"the place cannot be kept in {path}: {error.strerror or error}; make room or mend that, and start again: "
        "what was passed on since the last place is posted once more, and the receiver knows it"
    )


def _made(directory: Path) -> Path:
    try:
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"cannot keep the tunnel's place in {directory}: {error.strerror}") from None
    return directory


@contextmanager
def _alone(path: Path, what: str) -> Generator[None]:
    """Hold a lock that ends with the process, however that ends. The file stays: removed, it would lock nobody out."""
    if sys.platform == "win32":
        yield
        return
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise _not_kept(path, error) from None
    with os.fdopen(descriptor, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(f"another tunnel from {what} runs already, with the same place") from None
        yield
