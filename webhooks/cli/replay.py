"""`webhooks replay`."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

import click

from webhooks.cli.app import app_option, examples, printable, run
from webhooks.cli.replayed import BAD, print_plan, print_report, print_weighed, would
from webhooks.cli.replaying import Wanted, from_a_file, from_here
from webhooks.cli.selecting import is_everything, select_options, selection, somebody
from webhooks.loading import load_consumer
from webhooks.replay import INTERRUPTED, Plan, Report, Weighed
from webhooks.sending import target
from webhooks.settings import Settings

NOT_WITH_A_FILE = ("ids", "disposition", "since", "until", "row", "where_json", "upto")


@click.command(
    epilog=examples(
        "webhooks replay 12",
        "webhooks replay --status dead --since 2h",
        "webhooks replay --event pull_request.closed --where-json '$.repository.full_name=acme/app' --yes",
        "webhooks replay --row patch_sessions:123 --as new --yes",
        "webhooks replay --source github --since 1d --to http://127.0.0.1:8000 --yes",
        "webhooks replay --file deliveries.ndjson --yes",
        "webhooks replay --file payloads/ --source github --to http://127.0.0.1:8000",
    )
)
@select_options
@app_option
@click.option("--all", "everything", is_flag=True, help="Every delivery; without a filter this is asked for.")
@click.option(
    "--as",
    "how",
    type=click.Choice(("same", "new")),
    help="same (the default): the delivery itself runs again. new: a copy of it is received, under a key of its own.",
)
@click.option(
    "--file",
    type=click.Path(exists=True, allow_dash=True, path_type=Path),
    help="Out of what webhooks export wrote, a captured request, a payload, or a directory of these; - is stdin.",
)
@click.option("--to", metavar="URL", help="To the receiver at this address, by HTTP; without it into the inbox here.")
@click.option("--resign", is_flag=True, help="With --to or --file: sign anew, with the secret here.")
@click.option("--yes", is_flag=True, help="Do it; without this more than one delivery are only counted and listed.")
@click.option("--dry-run", "dry", is_flag=True, help="Only count and list, also a single one.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="So many a second at most.")
@click.option("--concurrency", type=click.IntRange(1, 100), default=8, show_default=True, help="So many sent at once.")
@click.option("--by", default=somebody, show_default="$USER", help="Who wants it; it is written down.")
@click.option("--reason", default="replay", show_default=True, help="Why; it is written down.")
@click.option("--json", "as_text", is_flag=True, help="As JSON, for programs.")
def replay(
    app: str,
    everything: bool,
    how: Literal["same", "new"] | None,
    file: Path | None,
    to: str | None,
    resign: bool,
    yes: bool,
    dry: bool,
    rate: float | None,
    concurrency: int,
    by: str,
    reason: str,
    as_text: bool,
    **filters: Any,
) -> None:
    """Run deliveries again: those of the inbox, by ID or filters, or those of a file.

    More than one are only shown, until you say --yes. The exit code is 0 when every one was done, 1 when some were not
    (refused, failed, pruned, or being applied just now) or it ended early, and 130 when it was interrupted. What ended
    early says how to go on. A file is left where it cannot be read, and a dry run exits with 1 as well.
    """
    _check(everything, how, file, to, filters, resign=resign, yes=yes, dry=dry)
    wanted = Wanted(
        selection=selection(filters),
        how=how or "same",
        file=file,
        to=to,
        resign=resign,
        yes=yes,
        dry=dry,
        rate=rate,
        concurrency=concurrency,
        by=by,
        reason=reason,
    )
    settings, consumer = Settings.load(), load_consumer(app)
    done = run(from_here(settings, consumer, wanted) if file is None else from_a_file(settings, consumer, wanted))
    if as_text:
        click.echo(json.dumps({"report" if isinstance(done, Report) else "plan": done.as_json()}, indent=2))
    elif isinstance(done, Plan):
        print_plan(done, lambda group: would(group, how=wanted.how, to=to))
        _ask(done.total, dry=dry)
    elif isinstance(done, Weighed):
        print_weighed(done, to)
        _ask(sum(fate.count for fate in done.fates if fate.result not in BAD), dry=dry)
        _advise({fate.cause for fate in done.fates if fate.cause}, resigned=resign, signed=False)
    else:
        print_report(done)
    if isinstance(done, Report):
        _end(done, wanted)
    if isinstance(done, Weighed) and (done.broken or any(fate.result in BAD for fate in done.fates)):
        raise click.exceptions.Exit(1)


def _check(
    everything: bool,
    how: str | None,
    file: Path | None,
    to: str | None,
    filters: dict[str, Any],
    *,
    resign: bool,
    yes: bool,
    dry: bool,
) -> None:
    """Refuse options that contradict each other, before anything is done."""
    if file is not None:
        if how or everything or any(filters[name] for name in NOT_WITH_A_FILE):
            raise click.UsageError("--file goes with --source, --event, --limit and --after; no other filter, no --as")
    elif everything and not is_everything(filters):
        raise click.UsageError("--all goes without a filter")
    elif not everything and is_everything(filters):
        raise click.UsageError("say which: IDs, filters, --file, or --all")
    if to is not None:
        if how:
            raise click.UsageError("--as goes without --to: the receiver there decides")
        target(to, "source")
    elif resign and file is None:
        raise click.UsageError("--resign goes with --to or --file: what is in the inbox is not verified again")
    if yes and dry:
        raise click.UsageError("--yes and --dry-run exclude each other")


def _ask(total: int, *, dry: bool) -> None:
    how = ("without --dry-run" if total == 1 else "with --yes instead of --dry-run") if dry else "with --yes"
    ending = f"; do it {how}" if total else ""
    click.echo(f"\n{total:,} {'delivery' if total == 1 else 'deliveries'}, and nothing was done{ending}")


def _end(report: Report, wanted: Wanted) -> None:
    """Say on standard error what is to be known, and end with the exit code."""
    _advise(report.causes, resigned=wanted.resign, signed=0 < report.total <= report.signed)
    if report.stopped is not None:
        click.echo(printable(f"{report.stopped}; {_how_to_go_on(report, wanted)}"), err=True)
    if report.stopped == INTERRUPTED:
        raise click.exceptions.Exit(130)
    if not report.well:
        raise click.exceptions.Exit(1)


def _advise(causes: Collection[str], *, resigned: bool, signed: bool) -> None:
    """Say on standard error what helps against a refusal."""
    if "stale_timestamp" in causes and not resigned:
        click.echo("a signature with a time in it is too old: --resign signs anew, with the secret here", err=True)
    if "bad_signature" in causes:
        click.echo(
            "the receiver has another secret than the one known here: run this in its directory, or with its settings"
            if resigned or signed
            else "signed with another secret than the receiver's: --resign signs anew, with the one here",
            err=True,
        )


def _how_to_go_on(report: Report, wanted: Wanted) -> str:
    which, done = wanted.selection, report.total - report.broken
    options: list[str] = []
    if report.after > which.after and report.total:
        options.append(f"--after {report.after}")
    if report.upto is not None and not which.ids:  # what has arrived since was not meant
        options.append(f"--up-to {report.upto}")
    if which.limit is not None and report.total:
        options.append(f"--limit {max(which.limit - report.total, 1)}")
    on = " ".join(options)
    if report.broken:
        before = f"{done:,} before it done, nothing after it" if done else "nothing was done"
        known = " (what was done is known as a duplicate)" if done else ""
        # Without --yes there is but one.
        without = f", or leave it out with {on}" if wanted.yes else ""
        return f"{before}. Mend the file and run the same command again{known}{without}"
    nothing = "" if done else "nothing was done: "
    return f"{nothing}go on with the same command and {on}" if on else f"{nothing}run the same command again"
