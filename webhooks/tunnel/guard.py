"""Ends a program's whole group when the process that started it ends, however that was.

It is run as a program of its own, beside the guarded one, and reads its input: the number of the group, and then
nothing until the other end is gone. Whatever kills its parent closes that end; no signal of a terminal comes here.
"""

from __future__ import annotations

import os
import signal
import sys
import time

GRACE_S = 5.0
LOOK_EVERY_S = 0.05


def main() -> None:
    text = sys.stdin.buffer.read()
    if not text.endswith(b"\n"):
        return  # nothing was started
    group = int(text)
    for number in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + GRACE_S
        try:
            os.killpg(group, number)
            while time.monotonic() < until:
                os.killpg(group, 0)
                time.sleep(LOOK_EVERY_S)
        except OSError:
            return  # none of it is left


if __name__ == "__main__":
    main()
