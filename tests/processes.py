"""The command `webhooks` in processes of its own, as a person starts it."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import psycopg
from psycopg.sql import SQL, Identifier

ROOT = Path(__file__).parent.parent
SECRETS = {"WEBHOOKS_SECRET_SHORTCUT": "a secret", "WEBHOOKS_SECRET_GITHUB": "another secret"}
START_WITHIN_S = 60.0


def environment(**variables: str) -> dict[str, str]:
    """The environment of a child: ours, the code of this checkout, and the consumers of the tests."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    return {**os.environ, "PYTHONPATH": path, "WEBHOOKS_APP": "shop:consumer", **variables}


def eventually(condition: Callable[[], object], within_s: float = 20) -> None:
    """Wait until a condition holds."""
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until, "it did not come true in time"
        time.sleep(0.02)


class Process:
    """A running command.

    Attributes:
        cwd: its working directory.
    """

    def __init__(self, cwd: Path, name: str, arguments: tuple[str, ...], variables: dict[str, str]) -> None:
        self.cwd = cwd
        self._output, self._log = cwd / f"{name}.out", cwd / f"{name}.err"
        with self._output.open("wb") as out, self._log.open("wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "webhooks", *arguments],
                cwd=cwd,
                env=environment(**variables),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def says(self, text: str, within_s: float = START_WITHIN_S) -> None:
        """Wait until it has said something, on either stream."""
        with suppress(AssertionError):  # told below, with what it has said instead
            eventually(lambda: text in self.output + self.log or not self.alive, within_s)
        assert text in self.output + self.log, self.output + self.log

    @property
    def receiver(self) -> str:
        return self._url("receiver")

    @property
    def control(self) -> str:
        return self._url("control plane")

    def _url(self, name: str) -> str:
        self.says(f"{name}  http://")
        found = re.findall(rf"^{name}  (http://\S+)$", self.output, re.MULTILINE)
        return str(found[-1])

    def checks(self) -> dict[str, str]:
        """What /readyz says, or nothing while it does not answer."""
        try:
            found: dict[str, str] = httpx.get(f"{self.control}/readyz", timeout=5).json()["checks"]
        except httpx.TransportError:
            return {}
        return found

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self._process.send_signal(number)

    def ends(self, within_s: float = 20) -> int:
        """Wait for its end, and return its exit code."""
        return self._process.wait(within_s)

    def kill(self) -> None:
        if self.alive:
            for child in psutil.Process(self.pid).children(recursive=True):  # that of --reload
                child.kill()
        self._process.kill()
        self._process.wait(10)


@contextmanager
def answering(number: signal.Signals, how: signal.Handlers) -> Iterator[None]:
    """What is started in the block inherits whether it ignores a signal."""
    before = signal.signal(number, how)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def started(cwd: Path, *arguments: str, name: str = "serve", **variables: str) -> Iterator[Process]:
    """Start a command; it is killed at the end if it still lives."""
    process = Process(cwd, name, arguments, variables)
    try:
        yield process
    finally:
        process.kill()


@contextmanager
def serving(cwd: Path, url: str, *arguments: str, **variables: str) -> Iterator[Process]:
    """`webhooks serve` on a database, on free ports, once it runs."""
    ports = ("--port", "0", "--control-port", "0")
    quick = {"WEBHOOKS_POLL_S": "0.2", **SECRETS, "DATABASE_URL": url, **variables}
    with started(cwd, "serve", *ports, *arguments, **quick) as process:
        process.says("control plane  http://")
        yield process


def webhooks(cwd: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "webhooks", *arguments],
        cwd=cwd,
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@contextmanager
def empty_database(server_url: str) -> Iterator[str]:
    """A database without tables."""
    name = f"webhooks_test_{secrets.token_hex(4)}"
    with psycopg.connect(server_url, autocommit=True) as admin:
        admin.execute(SQL("CREATE DATABASE {}").format(Identifier(name)))
    try:
        yield urlsplit(server_url)._replace(path=f"/{name}").geturl()
    finally:
        with psycopg.connect(server_url, autocommit=True) as admin:
            admin.execute(SQL("DROP DATABASE {} WITH (FORCE)").format(Identifier(name)))
