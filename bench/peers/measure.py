"""How fast a peer works off what is there, and how soon it picks up what comes in."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from typing import Any, LiteralString

import psycopg

from peers import Mode, load
from peers.child import feed_process, fill_process, work_process
from peers.feed import PER_SECOND

STARTS_WITHIN_S = 60.0
FILLS_WITHIN_S = 300.0
ENDS_WITHIN_S = 15.0


class Failed(Exception):
    """A peer's process ended, or did not answer; the message says how."""


@dataclass(frozen=True, slots=True)
class Drained:
    """How a backlog was worked off.

    Args:
        done: how many jobs were completed, as the database shows it.
        seconds: from the first job's run, or where that cannot be told from the worker's start, to the last completion.
        startup_s: from the worker's start to the first job's run; None where it cannot be told apart.
        whole: whether the backlog was worked off within the time.
    """

    done: int
    seconds: float
    startup_s: float | None
    whole: bool

    @property
    def per_second(self) -> float:
        return self.done / self.seconds


def fill(name: str, url: str, jobs: int) -> None:
    """Make a peer's tables and insert its jobs."""
    with _process(fill_process, name, url, jobs) as told:
        told.wait_for("filled", FILLS_WITHIN_S)


def drain(name: str, url: str, mode: Mode, jobs: int, limit_s: float) -> Drained:
    """Let a peer work off what is in its database, for a limited time."""
    done = load(name).done
    with psycopg.connect(url, autocommit=True) as connection, _process(work_process, name, url, mode, jobs) as told:
        told.wait_for("ready", STARTS_WITHIN_S)
        started = time.time()
        told.pipe.send("go")
        until = started + limit_s
        first = told.wait_until("first", until)
        all_ran = told.wait_until("all", until) if first is not None else None
        # While jobs run nothing else is asked of the database; a worker whose jobs run elsewhere is asked now and then.
        completed = _count(connection, done)
        while completed < jobs and time.time() < until:
            time.sleep(0.005 if all_ran is not None else 0.05)
            completed = _count(connection, done)
        ended = time.time()
        told.pipe.send("stop")
    if not completed:
        raise Failed(f"nothing was completed within {limit_s:g} s")
    seconds = ended - (first or started)
    return Drained(completed, seconds, None if first is None else first - started, completed >= jobs)


def pick_up(name: str, url: str, jobs: int) -> list[float]:
    """Let jobs come in, and return how many seconds after its commit each ran."""
    elsewhere = load(name).enqueueing is not None
    lasts_s = jobs / PER_SECOND
    with _process(work_process, name, url, "pickup", jobs) as worker:
        worker.wait_for("ready", STARTS_WITHIN_S)
        worker.pipe.send("go")
        if elsewhere:
            time.sleep(2)  # whatever a worker does once it has started is over by then
            with _process(feed_process, name, url, jobs) as feeder:
                committed = feeder.wait_for("fed", lasts_s + STARTS_WITHIN_S)
        worker.wait_until("all", time.time() + (5 if elsewhere else lasts_s + 5))
        worker.pipe.send("stop")
        ran = worker.wait_for("ran", ENDS_WITHIN_S)
        own = worker.wait_for("fed", ENDS_WITHIN_S)
    committed = committed if elsewhere else own
    if len(ran) < len(committed):
        raise Failed(f"{len(committed) - len(ran)} of {len(committed)} jobs were not picked up")
    return [max(ran[number] - at, 0.0) for number, at in committed.items()]


def _count(connection: psycopg.Connection[Any], query: LiteralString) -> int:
    row = connection.execute(query).fetchone()
    assert row is not None
    return int(row[0])


class _Told:
    """What a process has said so far, in the order in which it was said."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe
        self._said: dict[str, Any] = {}

    def wait_until(self, what: str, until: float) -> Any | None:
        """Return what came with a word, or None when it was not said in time."""
        while what not in self._said:
            if not self.pipe.poll(max(until - time.time(), 0)):
                return None
            try:
                word, value = self.pipe.recv()
            except EOFError:
                raise Failed("its process ended") from None
            if word == "failed":
                raise Failed(str(value).strip())
            self._said[word] = value
        return self._said.pop(what)

    def wait_for(self, what: str, within_s: float) -> Any:
        """Return what came with a word.

        Raises:
            Failed: it was not said in time.
        """
        value = self.wait_until(what, time.time() + within_s)
        if value is None:
            raise Failed(f"its process did not say {what!r} within {within_s:g} s")
        return value


@contextmanager
def _process(target: Callable[..., None], *arguments: object) -> Generator[_Told]:
    """Run one process for the block, and end it with all that it started."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=target, args=(*arguments, there))
    process.start()
    there.close()
    try:
        yield _Told(here)
        process.join(ENDS_WITHIN_S)
    finally:
        if process.is_alive() and process.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join(5)
        here.close()
