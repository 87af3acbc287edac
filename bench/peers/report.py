"""The tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from peers import load, missing
from peers.feed import PER_SECOND
from peers.results import MODES, Results, targets


def report(console: Console, results: Results, given: Mapping[str, Any]) -> None:
    if results.drained:
        console.print(_drained(results))
        console.print(_settings(results))
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
    if left_out := given["not_measured"]:
        needed = sorted({package for name in left_out for package in missing(name)})
        told = f"not measured: {', '.join(left_out)}; not installed: {', '.join(needed)}, all in the extra `bench`"
        console.print(told, markup=False, highlight=False)
    for failure in results.failures:
        console.print(f"[red]failed:[/] {failure}", highlight=False)
    console.print(", ".join(f"{name} {version}" for name, version in given["versions"].items()), highlight=False)


def _drained(results: Results) -> Table:
    ours = {mode: results.rate("webhooks-queue", mode) for mode in MODES}
    title = "Claimed and completed a second, and how many times that our worker does from its queue"
    table = Table("", "one at a time", "", "defaults", "", "tuned", "", "start-up ms", title=title)
    for name, modes in results.drained.items():
        cells: list[str] = []
        for mode in MODES:
            rate, own = results.rate(name, mode), ours[mode]
            cells += ["-", ""] if rate is None else [_rate(rate), _times(own / rate) if own else ""]
        startups = [one.startup_s for rounds in modes.values() for one in rounds if one.startup_s is not None]
        cells.append(f"{statistics.median(startups) * 1000:.0f}" if startups else "in the rate")
        table.add_row(load(name).name, *cells)
    return table


def _settings(results: Results) -> Table:
    table = Table("", "one at a time", "defaults", "tuned", title="How each was set up")
    for name in results.drained:
        table.add_row(load(name).name, *(load(name).settings[mode] for mode in MODES))
    return table


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.1f}"


def _times(ratio: float) -> str:
    return f"{ratio:.2f} x" if ratio < 100 else f"{ratio:,.0f} x"


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
    table = Table("", "before", "meanwhile", "", "its last quarter", "", "after", title=title)
    for name, held in results.snapshots.items():
        cells = [text for rate in (held.meanwhile, held.at_last) for text in (_rate(rate), f"{rate / held.before:.0%}")]
        table.add_row(name, _rate(held.before), *cells, _rate(held.after))
    return table
