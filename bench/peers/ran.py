"""What every job does: nothing, except that it says that it ran.

In the worker's own process that is one call. A library that runs its jobs in further processes says it through a file,
whose name those inherit.
"""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection as Pipe

FILE = "BENCH_RAN"


class _Heard:
    """Counts the jobs of this process, and tells the first and the last of them."""

    def __init__(self, expected: int, pipe: Pipe, keep: bool) -> None:
        self.times: dict[int, float] = {}
        self._expected = expected
        self._pipe = pipe
        self._keep = keep
        self._count = 0

    def __call__(self, number: int) -> None:
        now = time.time()
        self._count += 1
        if self._count == 1:
            self._pipe.send(("first", now))
        if self._keep:
            self.times.setdefault(number, now)
        if self._count == self._expected:
            self._pipe.send(("all", now))


_heard: _Heard | None = None


def hear(expected: int, pipe: Pipe, *, keep: bool) -> _Heard:
    """Say of this process's jobs when the first and when all of them ran, and `keep` when each did."""
    global _heard
    _heard = _Heard(expected, pipe, keep)
    return _heard


def ran(number: int) -> None:
    """Say that a job ran."""
    if _heard is not None:
        _heard(number)
    elif path := os.environ.get(FILE):
        with open(path, "a") as file:
            file.write(f"{number} {time.time()}\n")


def read(path: str) -> dict[int, float]:
    """Return when the jobs of other processes ran."""
    with open(path) as file:
        lines = [line.split() for line in file]
    times: dict[int, float] = {}
    for number, at in lines:
        times.setdefault(int(number), float(at))
    return times
