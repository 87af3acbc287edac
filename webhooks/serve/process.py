"""What one process runs, in the order in which it starts, and stops the other way round.

The database first; then the control plane, which answers until the end; the accepter; under `--dev` what the consumer
brings; the worker; and last the receiver. On SIGTERM the receiver takes no more, the worker lets running work end, and
the embedded server is left when nothing needs it any more.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import psycopg
import structlog
from psycopg_pool import PoolTimeout

from webhooks.accept import Accepter
from webhooks.bell import Bell
from webhooks.claim import GONE_WITHIN
from webhooks.consumer import Consumer
from webhooks.control import Control
from webhooks.control.ask import Asker
from webhooks.control.checks import is_loopback
from webhooks.control.health import Process
from webhooks.db import Ready, ended
from webhooks.errors import WebhooksError
from webhooks.loading import DEFAULT_APP, load_consumer
from webhooks.pool import Pool
from webhooks.receiver import Receiver
from webhooks.reconcile.scheduled import plan
from webhooks.refusals import Refusals
from webhooks.rejections import Caps
from webhooks.retention import Ages, scheduled
from webhooks.serve.database import database, prepared
from webhooks.serve.http import Connections, Limits, raise_file_limit, tell_of_full_files
from webhooks.serve.reconciling import reconciling
from webhooks.serve.restored import put_restored_behind
from webhooks.serve.schedule import every
from webhooks.serve.secrets import Secrets, read_secrets
from webhooks.serve.servers import Listener, listening, serving
from webhooks.serve.signals import Signals, signals
from webhooks.settings import Settings
from webhooks.source_secrets import previous_secrets
from webhooks.status import applicable
from webhooks.worker import Worker
from webhooks.worker.fleet import Fleet

if sys.platform != "win32":
    import uvloop

log = structlog.get_logger(__name__)

LOOPBACK = "127.0.0.1"
# A follower of the feed that leaves closes its side, and one that takes nothing has a time-out of its own.
MOST_CONTROL_CONNECTIONS = 256
CONTROL_LIMITS = Limits(connections=MOST_CONTROL_CONNECTIONS, keep_alive_s=5, untaken_s=240, answers_half_closed=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to run.

    Args:
        app: the consumer, as `module:attribute`.
        dev: with secrets of its own and the consumer's `dev`.
        hosts: where the receiver listens.
        port: its port, 0 for any free one; None: no receiver.
        uds: a path where it listens besides.
        control_host: where the control plane listens.
        control_port: its port, 0 for any free one; None: no control plane.
        worker: whether to run a worker.
        prune_every_s: seconds between two prunings; None: the setting's.
        reconcile_every_s: seconds between two looks for what providers have and we do not; None: none.
    """

    app: str = DEFAULT_APP
    dev: bool = False
    hosts: tuple[str, ...] = (LOOPBACK,)
    port: int | None = None
    uds: Path | None = None
    control_host: str = LOOPBACK
    control_port: int | None = None
    worker: bool = True
    prune_every_s: float | None = None
    reconcile_every_s: float | None = None


@dataclass(frozen=True, slots=True)
class Running:
    """What runs, for telling a person.

    Args:
        options: what was asked for.
        consumer: what was loaded.
        settings: the environment.
        secrets: those of its sources.
        receiver: where it listens; nothing without one.
        control: where the control plane does.
    """

    options: Options
    consumer: Consumer
    settings: Settings
    secrets: Secrets
    receiver: tuple[Listener, ...]
    control: tuple[Listener, ...]

    @property
    def receiver_url(self) -> str | None:
        """Where a program of this machine reaches the receiver; None where it listens on a path alone, or not."""
        return _first_url(self.receiver)


def run(options: Options, ready: Callable[[Running], None]) -> None:
    """Run until SIGTERM, SIGINT or SIGHUP, and return after a clean stop.

    Args:
        options: what to run.
        ready: called once everything runs.

    Raises:
        WebhooksError: it could not start, or part of it ended by itself.
        psycopg.Error: the database refused something at the start.
    """
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_run(options, ready))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    if sys.platform == "win32":
        return asyncio.SelectorEventLoop  # psycopg does not work on the other one
    return uvloop.new_event_loop


async def _run(options: Options, ready: Callable[[Running], None]) -> None:
    left: set[str] = set()
    async with signals() as heard, AsyncExitStack() as stack:
        settings = Settings.load()
        consumer = load_consumer(options.app)
        secrets = Secrets({}, {}) if options.port is None else read_secrets(consumer, settings, dev=options.dev)
        watched, leave = await _start(stack, heard, options, settings, consumer, secrets, ready, left)
        heard.ready()
        await _until_stopped(heard, watched)
        leave()
        if settings.shutdown_delay_s and options.port is not None:
            await _delay(heard, settings.shutdown_delay_s)
    await _leave_the_stubborn(left)


async def _let_go(pool: Pool, left: set[str]) -> None:
    """Free the rows for which threads still work, as the last thing that is written: the threads end with the process,
    which is gone before anybody can claim a row, whatever hangs until then."""
    if not pool.threads.waiting:
        return
    left |= pool.threads.leave()
    gone = threading.Timer(GONE_WITHIN.total_seconds() - 1, os._exit, (1,))
    gone.daemon = True
    gone.start()
    await pool.threads.all_ended()


async def _leave_the_stubborn(left: set[str]) -> None:
    """End the process though a handler ignores that it was cancelled, or a thread goes on; where nothing else was said
    of its row, that is freed when its lease is over."""
    if left:
        log.error("threads still work for these rows, and end with the process", rows=sorted(left))
        _exit()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await ended(others)
    stubborn = sorted(task.get_name() for task in others if not task.done())
    if stubborn:
        log.error("still running though cancelled, and left behind", tasks=stubborn)
        _exit()


def _exit() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(1)


async def _start(
    stack: AsyncExitStack,
    heard: Signals,
    options: Options,
    settings: Settings,
    consumer: Consumer,
    secrets: Secrets,
    ready: Callable[[Running], None],
    left: set[str],
) -> tuple[list[asyncio.Task[None]], Callable[[], None]]:
    """Start everything; return the tasks that end only when something is wrong, and what is called before the end."""
    watched: list[asyncio.Task[None]] = []
    most_connections = raise_file_limit()
    # Sockets before anything that takes time: a port that is taken is the commonest mistake.
    public: list[Listener] = []
    private: list[Listener] = []
    if options.port is not None:
        public = stack.enter_context(listening(options.hosts, options.port, "--port", options.uds))
    if options.control_port is not None:
        private = stack.enter_context(listening([options.control_host], options.control_port, "--control-port"))
        if settings.control_token is None and not is_loopback(private[0].sock.getsockname()[0]):
            log.warning(
                "without WEBHOOKS_CONTROL_TOKEN the control plane answers programs of this machine only; set it before "
                "a proxy or a tunnel forwards to it, since not every one of them says that it does"
            )
    await stack.enter_async_context(_beside(tell_of_full_files()))
    found = await stack.enter_async_context(database(settings))
    if found.keeper is not None:
        watched.append(found.keeper)
    await prepared(found, settings, consumer)
    pool = await stack.enter_async_context(Pool.open(found.url, settings=settings))
    stack.push_async_callback(_let_go, pool, left)
    fleet = Fleet(pool, consumer, app=options.app, works=options.worker)
    await fleet.join()
    stack.push_async_callback(fleet.leave)
    worker = Worker(pool, consumer, fleet) if options.worker else None
    bell = Bell(pool) if worker is None else worker.bell
    control: Control | None = None

    def moved(rows: Sequence[Ready]) -> None:
        if worker is not None:
            worker.know(rows)
        bell.ring()
        if control is not None:
            control.feed.look()

    accepter = Accepter(pool, consumer, moved) if public else None
    if private:
        asker = Asker(pool)
        stack.push_async_callback(asker.close)
        control = Control(Process(asker, settings, worker, accepter), consumer)
        app = control.app([options.control_host])
        control_limits = replace(CONTROL_LIMITS, connections=min(most_connections // 2, MOST_CONTROL_CONNECTIONS))
        stack.push_async_callback(control.close)
        watched.append(
            await stack.enter_async_context(
                serving(app, [one.sock for one in private], "control plane", Connections(control_limits))
            )
        )
        stack.callback(control.stop)
        await stack.enter_async_context(_beside(put_restored_behind(pool)))
    if accepter is not None:
        await accepter.start()
        stack.push_async_callback(accepter.stop)
    if options.dev and consumer.dev is not None:
        if url := _first_url(public):
            os.environ["WEBHOOKS_RECEIVER_URL"] = url
        await stack.enter_async_context(consumer.dev())
    for warning in consumer.warnings() if consumer.warnings is not None else ():
        log.warning(warning)
    await stack.enter_async_context(_beside(fleet.keep_going()))
    bell.ring()  # what others had to leave is taken at once
    if worker is not None:
        await stack.enter_async_context(_working(worker, heard))
    else:
        await stack.enter_async_context(_ringing(bell))
    await stack.enter_async_context(_beside(_tell_of_ignored(pool, consumer, options.app)))
    if options.reconcile_every_s is not None:
        to_reconcile = plan(settings, consumer)
        work = reconciling(options.reconcile_every_s, pool, to_reconcile, moved)
        await stack.enter_async_context(_beside(work))
    prune_every_s = options.prune_every_s or settings.prune_every_s
    if prune_every_s is not None:
        Ages.of(settings, consumer.sources)  # what is wrong with a setting is told now, and not every hour
        pruning = every(prune_every_s, "prune", partial(scheduled, pool, consumer, settings))
        await stack.enter_async_context(_beside(pruning))
    connections = Connections(Limits(connections=most_connections, keep_alive_s=settings.keep_alive_s))
    if accepter is not None:

        def signing(source: str) -> tuple[str, ...]:
            return (*secrets.in_force.get(source, ()), *previous_secrets(source))

        refusals = Refusals(pool, consumer.sources, Caps.of(settings), signing)
        refusals.start()
        stack.push_async_callback(refusals.stop)
        receiver = Receiver(
            consumer.sources,
            secrets.in_force,
            accepter,
            max_body_bytes=settings.max_body_bytes,
            refusals=refusals,
            unverified_bytes=settings.unverified_bytes,
        )
        watched.append(
            await stack.enter_async_context(serving(receiver, [one.sock for one in public], "receiver", connections))
        )
    ready(Running(options, consumer, settings, secrets, tuple(public), tuple(private)))

    def leave() -> None:
        pool.health.leaving = connections.leaving = True

    return watched, leave


def _first_url(listeners: Sequence[Listener]) -> str | None:
    return next((one.url for one in listeners if one.url is not None), None)


async def _delay(heard: Signals, seconds: float) -> None:
    """Go on while others learn that this process stops; a second signal ends that."""
    log.info("still taking deliveries, and not ready any more", seconds=seconds)
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await heard.hurry.wait()


async def _until_stopped(heard: Signals, watched: Sequence[asyncio.Task[None]]) -> None:
    stopped = asyncio.create_task(heard.stop.wait())
    try:
        await asyncio.wait({stopped, *watched}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
    for task in watched:
        if task.done():
            task.result()
            raise WebhooksError(f"the {task.get_name()} ended by itself")


@asynccontextmanager
async def _working(worker: Worker, heard: Signals) -> AsyncGenerator[None]:
    worker.start()
    try:
        yield
    finally:
        await worker.stop(hurry=heard.hurry)


@asynccontextmanager
async def _ringing(bell: Bell) -> AsyncGenerator[None]:
    bell.start(listen=False)
    try:
        yield
    finally:
        await bell.stop()


@asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None]) -> AsyncGenerator[None]:
    """Do something beside everything else, at most as long as the block runs."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        await ended([task])


async def _tell_of_ignored(pool: Pool, consumer: Consumer, app: str) -> None:
    """Say how many deliveries were ignored for want of a handler that is there now, and how they run again."""
    of_app = "" if app == DEFAULT_APP else f" --app {quote(app)}"
    try:
        async with pool.transaction() as tx:
            found = await applicable(tx, consumer)
    except (psycopg.Error, PoolTimeout) as error:
        log.warning("cannot look for ignored deliveries", error=str(error).strip())
        return
    for (source, event), count in found.items():
        which = f"--status ignored --source {source}" + ("" if event is None else f" --event {quote(event)}")
        log.warning(
            "ignored for want of a handler that is there now: run them again, or have the provider redeliver them",
            source=source,
            deliveries_event=event,
            deliveries=count,
            list=f"webhooks deliveries{of_app} {which}",
            run=f"webhooks replay{of_app} {which} --yes",
        )
