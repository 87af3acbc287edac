"""Claims a second, in one run, side by side with the other ways to do it.

One embedded server, set as in production (a commit is on disk before it is answered), and for each of ours and each
peer a database of its own, filled beforehand. A worker runs in a process of its own, set up as its documentation says,
on jobs that return at once. Peers are packages of the extra `bench`; one that is not installed is left out and named.

    pip install -e '.[embedded,bench]'
    python bench/claims.py --json bench/claims.json        twenty minutes
    python bench/claims.py --quick                         three minutes, and rougher
    python bench/claims.py --only drain,limit --peers oban

drain      one job at a time; at each one's default settings; fifty at a time or otherwise tuned
limit      the SQL of our claim and completion as it goes over the wire, repeated by pgbench on one connection
pickup     from a job's commit to its run, fifty jobs a second
backlog    how long `claim_next` takes at 10,000, 100,000 and 1,000,000 open issues
snapshot   throughput before and while another transaction holds a snapshot

A rate counts what the database shows as completed, from the first job's run (so without the start of the worker, which
is printed beside it) to the last completion. What counts is the ratio within the run: the machine is noisy.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

import psycopg
from rich.console import Console

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # handlers, which no wheel carries

from peers import OURS, PEERS, Mode, backlog, limit, load, measure, missing, snapshot, versions
from peers.databases import Databases
from peers.report import report
from peers.results import MODES, Results, written

from webhooks.embedded import EmbeddedServer

SECTIONS = ("drain", "limit", "pickup", "backlog", "snapshot")
LIMITS = {"webhooks-known": limit.known_script, "webhooks-agents": limit.next_script}
LIMIT_ROWS = 100_000


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured."""

    rounds: int
    jobs: int
    seconds: float
    pickups: int
    sizes: tuple[int, ...]
    claims: int
    before_s: float
    held_s: float


# Both end by themselves: whatever was not done in its time counts with what was done of it.
FULL = Extent(3, 10_000, 6.0, 500, (10_000, 100_000, 1_000_000), 500, 15.0, 60.0)
QUICK = Extent(1, 3000, 3.0, 150, (10_000, 100_000), 200, 4.0, 10.0)


class Bench:
    """One run over one server."""

    def __init__(self, databases: Databases, extent: Extent, names: Sequence[str], console: Console) -> None:
        self._databases = databases
        self._extent = extent
        self._names = names
        self._console = console
        self.results = Results()

    def run(self, sections: Sequence[str]) -> None:
        steps = (self._drains, self._limits, self._pickups, self._backlog, self._snapshots)
        for section, step in zip(SECTIONS, steps, strict=True):
            if section in sections:
                step()

    def _drains(self) -> None:
        filled = [name for name in self._names if self._fill(name, _plain(name), self._extent.jobs)]
        for number in range(self._extent.rounds):
            for name in filled:
                for mode in MODES:
                    self._trying(f"drain, round {number + 1}: {name}, {mode}", partial(self._drain, name, mode))
        for name in filled:
            self._databases.drop(_plain(name))

    def _drain(self, name: str, mode: Mode) -> None:
        with self._databases.copy(_plain(name)) as url:
            drained = measure.drain(name, url, mode, self._extent.jobs, self._extent.seconds)
        self.results.drained.setdefault(name, {}).setdefault(mode, []).append(drained)

    def _limits(self) -> None:
        for name, taken_down in LIMITS.items():
            template = f"limit_{_plain(name)}"
            if not self._fill(name, template, LIMIT_ROWS):
                continue
            with self._databases.copy(template) as url:
                script = taken_down(url)
            for number in range(self._extent.rounds):
                self._trying(f"limit, round {number + 1}: {name}", partial(self._limit, name, template, script))
            self._databases.drop(template)

    def _limit(self, name: str, template: str, script: limit.Script) -> None:
        """pgbench and ours on copies of the same rows, one right after the other."""
        with self._databases.copy(template) as url:
            rate = limit.pgbench(url, script, load(name).done, self._extent.seconds)
        with self._databases.copy(template) as url:
            ours = measure.drain(name, url, "single", LIMIT_ROWS, self._extent.seconds)
        self.results.limits.setdefault(name, []).append(rate)
        self.results.beside.setdefault(name, []).append(ours.per_second)

    def _pickups(self) -> None:
        for name in self._names:
            if "pickup" in load(name).settings and self._fill(name, f"pickup_{_plain(name)}", 0):
                self._trying(f"pickup: {name}", partial(self._pick_up, name))

    def _pick_up(self, name: str) -> None:
        url = self._databases.url(f"pickup_{_plain(name)}")
        self.results.pickups[name] = backlog.latency(measure.pick_up(name, url, self._extent.pickups))
        self._databases.drop(f"pickup_{_plain(name)}")

    def _backlog(self) -> None:
        self._trying("backlog", self._backlogs)
        self._databases.drop("backlog")

    def _backlogs(self) -> None:
        url = self._databases.make("backlog")
        for size, found in backlog.at_each_size(url, self._extent.sizes, self._extent.claims):
            self.results.backlog[size] = found

    def _snapshots(self) -> None:
        ways = {
            "webhooks, known rows": snapshot.known_rows,
            "webhooks, heartbeat": snapshot.heartbeat,
            "plain SKIP LOCKED": snapshot.plain,
        }
        for number, (name, measured) in enumerate(ways.items()):
            self._trying(f"snapshot: {name}", partial(self._snapshot, name, measured, f"snapshot_{number}"))
            self._databases.drop(f"snapshot_{number}")

    def _snapshot(self, name: str, measured: Callable[[str, float, float], snapshot.Held], database: str) -> None:
        url = self._databases.make(database)
        self.results.snapshots[name] = measured(url, self._extent.before_s, self._extent.held_s)

    def _fill(self, name: str, template: str, jobs: int) -> bool:
        def fill() -> None:
            measure.fill(name, self._databases.make(template), jobs)
            self._databases.settle(template)

        return self._trying(f"{name}: inserting", fill)

    def _trying(self, what: str, step: Callable[[], None]) -> bool:
        """Do one step; what fails is noted, and the others go on."""
        with self._console.status(what):
            try:
                step()
            except (measure.Failed, limit.PgbenchFailed) as failure:
                self.results.failures.append(f"{what}: {failure}")
                return False
            except Exception:  # what was measured before it is told all the same
                self.results.failures.append(f"{what}: {traceback.format_exc(limit=-4)}")
                return False
        return True


def _plain(name: str) -> str:
    return name.replace("-", "_")


def _given(arguments: Sequence[str]) -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="less of everything")
    options.add_argument("--only", type=_listed(SECTIONS), default=SECTIONS, help="sections, comma-separated")
    others = tuple(name for name in PEERS if name not in OURS)
    options.add_argument("--peers", type=_listed(others), default=others, help="peers, comma-separated")
    options.add_argument("--rounds", type=int, help="how often each rate is measured")
    options.add_argument("--json", type=Path, help="where to write the figures")
    return options.parse_args(arguments)


def _listed(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def read(text: str) -> tuple[str, ...]:
        names = tuple(name.strip() for name in text.split(",") if name.strip())
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
        return names

    return read


def _versions(url: str, names: Sequence[str]) -> dict[str, str]:
    with psycopg.connect(url) as connection:
        row = connection.execute("SHOW server_version").fetchone()
    found = {"PostgreSQL": row[0] if row else "", "Python": platform.python_version(), "cores": str(os.cpu_count())}
    found |= {"uvloop": metadata.version("uvloop"), "pgbench": limit.version().split()[-1]}
    for name in names:
        found |= versions(name)
    return found


def main(arguments: Sequence[str]) -> None:
    given = _given(arguments)
    extent = QUICK if given.quick else FULL
    if given.rounds is not None:
        extent = Extent(**{**asdict(extent), "rounds": given.rounds})
    wanted = (*OURS, *given.peers)
    names = [name for name in wanted if not missing(name)]
    for name in [name for name in os.environ if name.startswith("WEBHOOKS_")]:
        del os.environ[name]  # ours, too, are measured at their defaults
    # Narrower than its columns, a table hides what matters; where there is no terminal nobody said how wide it may be.
    console = Console() if sys.stdout.isatty() else Console(width=160)
    logging.disable(logging.WARNING)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server and the workers are ended then too
    with tempfile.TemporaryDirectory() as home:
        server = EmbeddedServer(Path(home))
        try:
            url = server.start()
            said = {
                "versions": _versions(url, names),
                "extent": asdict(extent),
                "not_measured": [name for name in wanted if name not in names],
            }
            bench = Bench(Databases(url), extent, names, console)
            with suppress(KeyboardInterrupt):
                bench.run(given.only)
        finally:
            server.close()
    report(console, bench.results, said)
    if given.json is not None:
        given.json.write_text(written(bench.results, said))


if __name__ == "__main__":
    main(sys.argv[1:])
