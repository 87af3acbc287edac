"""`webhooks trigger`."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from webhooks.cli.answered import fail_if_unexpected, print_answers
from webhooks.cli.app import app_option, console, examples, run
from webhooks.cli.asked import Wanted, check, sendings, source_named
from webhooks.cli.asking import Id
from webhooks.cli.posting import Answer, post
from webhooks.cli.saying import say
from webhooks.errors import Unavailable
from webhooks.loading import load_consumer
from webhooks.samples import is_example, names
from webhooks.samples.faults import BAD, Bad, Sending
from webhooks.sending import target
from webhooks.settings import Settings
from webhooks.sources import Source

RECEIVER = "http://127.0.0.1:8000"
AT_ONCE = 50
MOST_NAMES = 20
SHOWN_FROM = 500


@click.command(
    epilog=examples(
        "webhooks trigger shortcut story.update --times 50",
        "webhooks trigger shortcut story-comment.create --set actions.0.story_id=123",
        "webhooks trigger github pull_request.closed --set pull_request.merged=false",
        "webhooks trigger github release.published --file release.json",
        "webhooks trigger shortcut story.create story.update story.delete --shuffle",
        "webhooks trigger github push --times 1000 --concurrency 100 --fresh",
        "webhooks trigger github push --bad signature",
        "webhooks trigger --from-delivery 12 --same-id",
        "webhooks trigger --list github",
    )
)
@click.argument("source", required=False)
@click.argument("events", metavar="[EVENT]...", nargs=-1)
@app_option
@click.option("--list", "listing", is_flag=True, help="List the samples, of one source or of all.")
@click.option(
    "--set", "changes", multiple=True, metavar="PATH=VALUE", help="Change a value of the body; JSON, or text."
)
@click.option("--times", type=click.IntRange(1, 100_000), default=1, help="Send each delivery so many times.")
@click.option("--fresh", is_flag=True, help="With --times: a new delivery each time, instead of copies.")
@click.option("--concurrency", type=click.IntRange(1, 1000), help="How many at once: 50, of several events 1.")
@click.option("--shuffle", is_flag=True, help="Send in random order.")
@click.option("--seed", type=int, help="With --shuffle: the order of an earlier call again.")
@click.option("--bad", type=click.Choice(BAD), help="Send it wrong: see below.")
@click.option(
    "--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A body to send instead of a sample."
)
@click.option("--exact", is_flag=True, help="Send the file byte for byte, without a fresh id.")
@click.option("--from-delivery", type=Id("deliveries"), metavar="ID", help="Send a stored delivery anew.")
@click.option("--same-id", is_flag=True, help="With --from-delivery: byte for byte and with its id: a copy of it.")
@click.option("--id", "given", help="The delivery's id; a fresh one by default.")
@click.option(
    "--url",
    envvar="WEBHOOKS_RECEIVER_URL",
    default=RECEIVER,
    show_default=True,
    metavar="URL",
    help="The receiver; /webhooks/{source} is added.",
)
def trigger(
    source: str | None,
    events: tuple[str, ...],
    app: str,
    listing: bool,
    changes: tuple[str, ...],
    times: int,
    fresh: bool,
    concurrency: int | None,
    shuffle: bool,
    seed: int | None,
    bad: Bad | None,
    file: Path | None,
    exact: bool,
    from_delivery: int | None,
    same_id: bool,
    given: str | None,
    url: str,
) -> None:
    """Send signed sample deliveries to a running receiver.

    The id is fresh, so every call is a new delivery; --times repeats one. Several events of one call tell of the same
    thing, where their samples are made here. The secret is the receiver's own, from WEBHOOKS_SECRET_<SOURCE> or from
    where serve --dev keeps it.

    \b
    --bad signature  signed with another secret
    --bad stale      signed an hour too long ago, where the source signs a time
    --bad truncated  a longer Content-Length than what is sent; the connection is cut
    --bad form       GitHub's form encoding, rightly signed
    --bad chunked    in chunks that cut characters of several bytes, rightly signed

    The exit code is 0 when each was answered as it should be: what is wrong refused, the rest taken. It is 1 otherwise,
    and 130 when it was interrupted; what was answered until then is told.
    """
    wanted = Wanted(
        events=events,
        changes=changes,
        times=times,
        fresh=fresh,
        shuffle=shuffle,
        seed=seed,
        file=file,
        exact=exact,
        id=given,
        delivery=from_delivery,
        same_id=same_id,
        bad=bad,
    )
    sources = load_consumer(app).sources
    if listing:
        if events:
            raise click.UsageError("--list goes with a source, or with nothing")
        _list([source_named(sources, source)] if source is not None else list(sources.values()))
        return
    check(wanted, source)
    sender, sent = sendings(wanted, sources, source, Settings.load())
    where = target(url, sender.name)
    if shuffle:
        _shuffle(sent, seed)
    several = len({one.event for one in sent}) > 1
    answers = _posted(where, sent, concurrency or (1 if several else AT_ONCE), several=several)
    print_answers(answers, several=several)
    fail_if_unexpected(answers, where, sender)
    if sent[0].refused:
        say("as it should be: sent wrong on purpose, and not taken")


def _posted(where: str, sent: Sequence[Sending], at_once: int, *, several: bool) -> list[Answer]:
    """Post all, and return the answers; where that ends early, tell of those that there are.

    Raises:
        click.Abort: it was interrupted.
        Unavailable: nobody answers, or nobody does any more.
    """
    answers: dict[int, Answer] = {}
    try:
        with _progress(len(sent)) as progress:

            def answered(place: int, answer: Answer) -> None:
                answers[place] = answer
                progress()

            return run(post(where, sent, at_once, answered))
    except (KeyboardInterrupt, Unavailable) as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        if interrupted and sys.stderr.isatty():
            click.echo(err=True)  # the terminal has written ^C into the line
        print_answers([answers[place] for place in sorted(answers)], several=several)
        if interrupted or answers:
            under_way = min(at_once, len(sent) - len(answers))
            click.echo(
                f"{'interrupted' if interrupted else 'ended early'}: {len(answers):,} of {len(sent):,} were answered; "
                f"what was under way besides ({under_way:,} at most) may have been taken",
                err=True,
            )
        if interrupted:
            raise click.Abort from None
        raise


def _shuffle(sendings: list[Sending], seed: int | None) -> None:
    seed = random.randrange(1_000_000) if seed is None else seed
    random.Random(seed).shuffle(sendings)
    order = [one.event for one in sendings[:MOST_NAMES]]
    more = f", and {len(sendings) - MOST_NAMES} more" if len(sendings) > MOST_NAMES else ""
    say(f"order (--seed {seed}): {', '.join(order)}{more}")


@contextmanager
def _progress(count: int) -> Generator[Callable[[], None]]:
    """Show on a terminal's standard error how many are answered, where there are many."""
    shown = count >= SHOWN_FROM and sys.stderr.isatty()
    with Progress(console=Console(stderr=True), transient=True, disable=not shown) as bar:
        task = bar.add_task("sending", total=count)
        yield lambda: bar.update(task, advance=1)


def _list(sources: Sequence[Source]) -> None:
    table = Table("source", "event", "sample", box=None, pad_edge=False)
    for source in sources:
        for name in names(source):
            what = "the provider's own example" if is_example(source, name) else "made anew each time"
            table.add_row(source.name, name, what)
    console().print(table)
