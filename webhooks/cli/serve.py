"""`webhooks serve` and `webhooks work`."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from pathlib import Path

import click

from webhooks.cli.app import app_option, examples
from webhooks.cli.trigger import RECEIVER
from webhooks.loading import DEFAULT_APP
from webhooks.observe import configure_logging
from webhooks.samples import names
from webhooks.serve.process import LOOPBACK, Options, Running, run
from webhooks.serve.reload import run_reloading
from webhooks.settings import Settings, duration

PORT = click.IntRange(0, 65_535)


def _read_every(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    try:
        return None if value is None else duration(value).total_seconds()
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


@click.command(
    epilog=examples(
        "webhooks serve --dev",
        "DATABASE_URL=postgresql://… WEBHOOKS_SECRET_GITHUB=… webhooks serve --app shop:consumer --host 0.0.0.0",
    )
)
@app_option
@click.option("--dev", is_flag=True, help="Make secrets, print how to try it, and run what the consumer brings for it.")
@click.option(
    "--host", "hosts", multiple=True, help=f"Where the receiver listens, may be repeated; :: is both. [{LOOPBACK}]"
)
@click.option("--port", type=PORT, default=8000, show_default=True, help="Its port; 0 takes any free one.")
@click.option(
    "--uds", type=click.Path(dir_okay=False, path_type=Path), help="A path for a unix socket, without --host alone."
)
@click.option("--control-host", default=LOOPBACK, show_default=True, help="Where the control plane listens.")
@click.option("--control-port", type=PORT, default=3100, show_default=True, help="Its port; 0 takes any free one.")
@click.option("--worker/--no-worker", default=True, help="Run a worker in this process, or leave it to webhooks work.")
@click.option("--prune-every", callback=_read_every, help="Prune again and again: 1h, 12h; WEBHOOKS_PRUNE_EVERY_S.")
@click.option("--reconcile-every", callback=_read_every, help="Fetch what is missing again and again: 15m, 1h.")
@click.option("--reload", is_flag=True, help="Start again whenever a Python file of the working directory changes.")
def serve(
    app: str,
    dev: bool,
    hosts: tuple[str, ...],
    port: int,
    uds: Path | None,
    control_host: str,
    control_port: int,
    worker: bool,
    prune_every: float | None,
    reconcile_every: float | None,
    reload: bool,
) -> None:
    """Run the receiver, the control plane and a worker.

    Without DATABASE_URL an embedded PostgreSQL is started under .webhooks/. SIGTERM stops in order: no new deliveries,
    running work may end (WEBHOOKS_DRAIN_S), then all is closed; a second signal cuts that short.
    """
    _configure()
    hosts = hosts or (() if uds is not None else (LOOPBACK,))
    if dev and not hosts:
        raise click.UsageError("--dev sends deliveries to itself, and needs a --host besides --uds")
    if reload:
        _reload(app, dev, hosts, port, uds, control_host, control_port, worker, prune_every, reconcile_every)
    options = Options(
        app=app,
        dev=dev,
        hosts=hosts,
        port=port,
        uds=uds,
        control_host=control_host,
        control_port=control_port,
        worker=worker,
        prune_every_s=prune_every,
        reconcile_every_s=reconcile_every,
    )
    run(options, announce)


@click.command(epilog=examples("DATABASE_URL=postgresql://… webhooks work --app shop:consumer"))
@app_option
@click.option("--control-host", default=LOOPBACK, show_default=True, help="Where the control plane listens.")
@click.option("--control-port", type=PORT, help="A port for a control plane; without it there is none.")
def work(app: str, control_host: str, control_port: int | None) -> None:
    """Run a worker alone. Any number of processes may share a database.

    It starts and stops like serve, and needs no secrets.
    """
    _configure()
    run(Options(app=app, control_host=control_host, control_port=control_port), announce)


def _configure() -> None:
    configure_logging(level=logging.getLevelNamesMapping()[Settings.load().log_level.upper()])


def _reload(
    app: str,
    dev: bool,
    hosts: tuple[str, ...],
    port: int,
    uds: Path | None,
    control_host: str,
    control_port: int,
    worker: bool,
    prune_every: float | None,
    reconcile_every: float | None,
) -> None:
    if not port or not control_port:
        raise click.UsageError("--reload needs fixed ports: a new start would take others")
    arguments = ["serve", "--app", app, "--port", str(port)]
    arguments += [part for host in hosts for part in ("--host", host)]
    arguments += ["--uds", str(uds)] if uds is not None else []
    arguments += ["--control-host", control_host, "--control-port", str(control_port)]
    arguments += [*(["--dev"] if dev else []), "--worker" if worker else "--no-worker"]
    arguments += ["--prune-every", f"{prune_every:.0f}s"] if prune_every is not None else []
    arguments += ["--reconcile-every", f"{reconcile_every:.0f}s"] if reconcile_every is not None else []
    sys.exit(run_reloading(arguments, Path.cwd(), lambda text: click.echo(f"reload: {text}", err=True)))


def announce(running: Running) -> None:
    """Say on standard output what runs and where, and under `--dev` how to try it."""
    if not running.receiver:
        click.echo(f"worker for {', '.join(running.consumer.gates) or 'the inbox alone'}")
    for listener in running.receiver:
        click.echo(f"receiver  {listener.address}")
    for name in running.consumer.sources if running.receiver else ():
        secret = running.secrets.made.get(name)
        kept = f"  secret {secret} (kept in {running.settings.home / 'secrets' / name})" if secret else ""
        click.echo(f"  {running.receiver[0].address}/webhooks/{name}{kept}")
    for listener in running.control:
        click.echo(f"control plane  {listener.address}")
    if running.options.dev and (try_it := example(running)):
        click.echo(f"try it  {try_it}")


def example(running: Running) -> str | None:
    """Return a command that sends a sample the consumer has a handler for; None when it has no such handler."""
    for name, source in running.consumer.sources.items():
        handled = [event for event in source.handlers if event in names(source) or "any" in names(source)]
        if handled:
            # An update is the plainest thing that happens to anything.
            event = next((event for event in handled if event.endswith(".update")), handled[0])
            options = "" if running.options.app == DEFAULT_APP else f" --app {running.options.app}"
            options += "" if running.receiver_url == RECEIVER else f" --url {running.receiver_url}"
            return f"{command()} trigger {name} {event}{options}"
    return None


def command() -> str:
    """Return how this very command can be called from the working directory."""
    script = Path(sys.argv[0])
    if script.name == "__main__.py":
        return f"{_short(Path(sys.executable))} -m webhooks"
    found = shutil.which("webhooks")
    if found is not None and os.path.samefile(found, script):
        return "webhooks"
    return _short(script)


def _short(path: Path) -> str:
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
