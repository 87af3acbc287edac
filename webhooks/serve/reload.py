"""Start a process again whenever a Python file changes, for developing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from webhooks.serve.signals import ending

LOOK_EVERY_S = 0.5
# Work that runs is let go early: it goes back uncharged, and the new process takes it up.
DRAIN_S = 2.0
END_WITHIN_S = 20.0
NOT_OURS = frozenset({"__pycache__", "node_modules"})

State = dict[Path, tuple[int, int]]


def run_reloading(arguments: Sequence[str], directory: Path, tell: Callable[[str], None]) -> int:
    """Run `webhooks` with arguments until SIGTERM, SIGINT or SIGHUP, again after every change of a Python file.

    When it ends by itself, the next change starts it again: a mistake is mended by saving the file.

    Args:
        arguments: those of the command, without `--reload`.
        directory: whose files are looked at; hidden directories and virtual environments are left out.
        tell: called with what a person should know.

    Returns:
        The exit code of the process when it was stopped.
    """
    asked: deque[int] = deque()
    stopping = threading.Event()

    def received(number: int, _: FrameType | None) -> None:
        asked.append(number)
        stopping.set()

    before = {number: signal.signal(number, received) for number in ending()}
    try:
        state = snapshot(directory)
        child = _start(arguments)
        told = False
        while not stopping.wait(LOOK_EVERY_S):
            if not told and child.poll() is not None:
                told = True
                tell(f"it ended (exit code {child.returncode}): the next change of a file starts it again")
            now = snapshot(directory)
            if now == state:
                continue
            tell(f"{_changed(state, now, directory)} changed: starting again")
            state = now
            _stop(child)
            if not stopping.is_set():
                child, told = _start(arguments), False
        return _pass_on(asked, child)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _pass_on(asked: deque[int], child: subprocess.Popen[bytes]) -> int:
    """Let the child have the signals we were sent, until it has ended; a second one cuts its stop short."""
    while child.poll() is None:
        if asked:
            child.send_signal(asked.popleft())
        time.sleep(0.05)
    return child.wait()


def snapshot(directory: Path) -> State:
    """Return every Python file under a directory, with its time of change and size."""
    found: State = {}
    for path in _files(directory):
        try:
            stat = path.stat()
        except OSError:
            continue  # removed just now
        found[path] = (stat.st_mtime_ns, stat.st_size)
    return found


def _files(directory: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(directory):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and name not in NOT_OURS and not Path(folder, name, "pyvenv.cfg").exists()
        ]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _changed(before: State, now: State, directory: Path) -> str:
    changed = sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))
    first = changed[0].relative_to(directory)
    return str(first) if len(changed) == 1 else f"{first} and {len(changed) - 1} more"


def _start(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    # A group of its own: Ctrl-C reaches us alone, and the child gets one signal for it, not two.
    return subprocess.Popen(  # noqa: S603 - our own command
        [sys.executable, "-m", "webhooks", *arguments],
        stdin=subprocess.DEVNULL,
        process_group=None if sys.platform == "win32" else 0,
    )


def _stop(child: subprocess.Popen[bytes]) -> None:
    for wait_s in (DRAIN_S, END_WITHIN_S):
        if child.poll() is not None:
            return
        child.terminate()
        try:
            child.wait(wait_s)
        except subprocess.TimeoutExpired:
            continue
    if child.poll() is None:
        child.kill()
        child.wait()
