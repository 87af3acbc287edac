"""Jobs that come in, one at a time and evenly."""

from __future__ import annotations

import asyncio
import time

from peers import Enqueue

PER_SECOND = 50.0

committed: dict[int, float] = {}
"""When each job of this process was."""


async def feed(enqueue: Enqueue, jobs: int) -> None:
    """Enqueue jobs 1 to n."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    for number in range(1, jobs + 1):
        await asyncio.sleep(started + number / PER_SECOND - loop.time())
        await enqueue(number)
        committed[number] = time.time()
