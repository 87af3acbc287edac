"""The processes of one measurement: one that inserts beforehand, one that works, one from which jobs come in."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection as Pipe
from typing import Any

import uvloop

from peers import Mode, Peer, feed, load, ran


def fill_process(name: str, url: str, jobs: int, pipe: Pipe) -> None:
    peer = load(name)
    _run(peer, lambda: _fill(peer, url, jobs, pipe), pipe)


def work_process(name: str, url: str, mode: Mode, jobs: int, pipe: Pipe) -> None:
    peer = load(name)
    with tempfile.NamedTemporaryFile() as elsewhere:
        os.environ[ran.FILE] = elsewhere.name
        heard = ran.hear(jobs, pipe, keep=mode == "pickup")
        _run(peer, lambda: _work(peer, url, mode, jobs, pipe), pipe)
        pipe.send(("ran", {**ran.read(elsewhere.name), **heard.times}))
        pipe.send(("fed", feed.committed))


def feed_process(name: str, url: str, jobs: int, pipe: Pipe) -> None:
    peer = load(name)
    _run(peer, lambda: _feed(peer, url, jobs, pipe), pipe)


def _run(peer: Peer, main: Callable[[], Coroutine[Any, Any, None]], pipe: Pipe) -> None:
    os.setsid()  # so that whatever this process starts can be ended with it
    logging.disable(logging.WARNING)  # being cut off in the middle is what happens to a worker here
    try:
        if peer.uvloop:
            uvloop.run(main())
        else:
            asyncio.run(main())
    except BaseException:
        pipe.send(("failed", traceback.format_exc(limit=-4)))


async def _fill(peer: Peer, url: str, jobs: int, pipe: Pipe) -> None:
    await peer.fill(url, jobs)
    pipe.send(("filled", time.time()))


async def _work(peer: Peer, url: str, mode: Mode, jobs: int, pipe: Pipe) -> None:
    told = {"go": asyncio.Event(), "stop": asyncio.Event()}

    def hear() -> None:
        try:
            told[pipe.recv()].set()
        except EOFError:
            os._exit(1)  # who measured is gone

    async def go() -> None:
        pipe.send(("ready", time.time()))
        await told["go"].wait()

    asyncio.get_running_loop().add_reader(pipe.fileno(), hear)
    working = asyncio.ensure_future(peer.work(url, mode, jobs, go))
    stopping = asyncio.create_task(told["stop"].wait())
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if working.done():
        working.result()
        await stopping
    working.cancel()
    await asyncio.wait({working}, timeout=10)


async def _feed(peer: Peer, url: str, jobs: int, pipe: Pipe) -> None:
    assert peer.enqueueing is not None
    async with peer.enqueueing(url) as enqueue:
        await feed.feed(enqueue, jobs)
    pipe.send(("fed", feed.committed))
