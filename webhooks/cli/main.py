"""The command line: its commands, the consumer's own beside them, and how errors are told."""

from __future__ import annotations

import errno
import logging
import os
import sys
from typing import Any, NoReturn

import click
import psycopg

from webhooks.cli.app import app_of_context, app_option, examples, printable, told
from webhooks.cli.deliveries import deliveries
from webhooks.cli.escalations import escalations, resolve, retry
from webhooks.cli.export import export
from webhooks.cli.hooks import hooks
from webhooks.cli.migrate import migrate
from webhooks.cli.prune import prune
from webhooks.cli.reconcile import reconcile
from webhooks.cli.rejections import rejections
from webhooks.cli.replay import replay
from webhooks.cli.serve import serve, work
from webhooks.cli.status import status
from webhooks.cli.trigger import trigger
from webhooks.cli.tunnel import tunnel
from webhooks.cli.verify import verify
from webhooks.cli.why import why
from webhooks.errors import ConfigurationError, UnknownName, WebhooksError
from webhooks.loading import load_consumer
from webhooks.observe import configure_logging

OUTPUT_CLOSED = 141
"""The exit code where whoever read our output has seen enough: as of a program that SIGPIPE ended."""


class Commands(click.Group):
    """Ours, and those of the consumer, which is loaded only when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        own = super().list_commands(ctx)
        return own + sorted(self._consumers(ctx).keys() - set(own))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, cmd_name) or self._consumers(ctx).get(cmd_name)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[Any, Any, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if ctx.meta.get("webhooks.app"):  # what keeps the consumer's own commands away
                message = f"{error.format_message()} ({ctx.meta['webhooks.app']})"
                raise click.UsageError(message, error.ctx) from None
            raise

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            _drop_the_rest()
            raise click.exceptions.Exit(OUTPUT_CLOSED) from None
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            _drop_the_rest()
            raise click.ClickException("no space is left on the disk: what was written is not whole") from None
        return result

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        if reason := ctx.meta.get("webhooks.app"):
            formatter.write_paragraph()
            formatter.write_text(f"No commands of your own are shown: {reason}")

    def _consumers(self, ctx: click.Context) -> dict[str, click.Command]:
        if "webhooks.app" not in ctx.meta:
            try:
                consumer = load_consumer(ctx.params.get("app") or app_of_context())
            except ConfigurationError as error:
                ctx.meta["webhooks.app"], ctx.meta["webhooks.commands"] = str(error), {}
            else:
                ctx.meta["webhooks.app"] = None
                ctx.meta["webhooks.commands"] = {command.name: command for command in consumer.commands if command.name}
        found: dict[str, click.Command] = ctx.meta["webhooks.commands"]
        return found


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples("webhooks serve --dev", "webhooks trigger shortcut story.update", "webhooks deliveries"),
)
@app_option
@click.version_option(package_name="webhooks", prog_name="webhooks")
def cli(app: str) -> None:
    """A webhook consumer whose work happens once."""
    # Standard output is for what was asked: it may be JSON, or a body.
    configure_logging(level=logging.WARNING)


for command in (prune, serve, work, migrate, status, deliveries, trigger, why, verify, escalations, retry, resolve):
    cli.add_command(command)
cli.add_command(export)
cli.add_command(hooks)
cli.add_command(reconcile)
cli.add_command(replay)
cli.add_command(rejections)
cli.add_command(tunnel)


def main() -> None:
    """Run the command of this process; an error is one line on standard error."""
    try:
        code = cli.main(prog_name="webhooks", standalone_mode=False)
    except click.UsageError as error:
        named = error.ctx.command_path if error.ctx is not None else "webhooks"
        _fail(f"{error.format_message()} (see {named} --help)", error.exit_code)
    except click.ClickException as error:
        _fail(error.format_message(), error.exit_code)
    except UnknownName as error:
        _fail(told(error), 2)
    except (WebhooksError, psycopg.Error) as error:
        _fail(told(error), 1)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


def _drop_the_rest() -> None:
    """Let Python flush at exit what nobody takes, so that it does not complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, code: int) -> NoReturn:
    click.echo(printable(f"webhooks: {message}"), err=True)
    sys.exit(code)
