"""How a command ends that has no end of its own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any

import click

from webhooks.db import ended
from webhooks.serve.signals import signals

# Whoever passes a signal on to our whole group, as `timeout` does, sends it twice: that is no second wish.
ONE_SIGNAL_S = 0.5


async def until_stopped(work: Coroutine[Any, Any, None]) -> None:
    """Run something until Ctrl-C, SIGTERM or SIGHUP, and give it the time to undo what it did: so it ends well.

    It is cancelled once: removing a hook takes a provider's answer. A second signal cuts that short.

    Raises:
        click.Abort: it was cut short.
    """
    async with signals() as heard:
        running = [task := asyncio.create_task(work), stop := asyncio.create_task(heard.stop.wait())]
        heard.ready()
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                if sys.stderr.isatty():
                    click.echo(err=True)  # a terminal has written ^C into the line
                task.cancel()
                await asyncio.wait({task}, timeout=ONE_SIGNAL_S)
                heard.hurry.clear()
                running.append(hurry := asyncio.create_task(heard.hurry.wait()))
                await asyncio.wait({task, hurry}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                click.echo(
                    "cut short: a hook that is still there is removed by the next webhooks tunnel --via", err=True
                )
                raise click.Abort
            if not task.cancelled():
                task.result()
        finally:
            await ended(running)
