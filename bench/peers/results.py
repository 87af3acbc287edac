"""What was measured, and whether it is enough."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from peers import Mode, load
from peers.backlog import Latency
from peers.measure import Drained
from peers.snapshot import Held

MODES: tuple[Mode, ...] = ("single", "default", "tuned")


DRAINED = ("webhooks-known", "webhooks-queue")


@dataclass(slots=True)
class Results:
    """What was measured: by peer, by mode, a value a round."""

    drained: dict[str, dict[str, list[Drained]]] = field(default_factory=dict)
    limits: dict[str, list[float]] = field(default_factory=dict)
    beside: dict[str, list[float]] = field(default_factory=dict)
    pickups: dict[str, Latency] = field(default_factory=dict)
    backlog: dict[int, dict[str, Latency]] = field(default_factory=dict)
    snapshots: dict[str, Held] = field(default_factory=dict)
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


def targets(results: Results) -> list[Target]:
    """Compare what was measured with what issue 3 of this project asks for."""
    found: list[Target] = []
    for name, rates in results.limits.items():
        ratio = statistics.median(ours / most for ours, most in zip(results.beside[name], rates, strict=True))
        found.append(Target(f"one at a time: {load(name).name} / the same SQL under pgbench", 0.5, ratio))
    # A heartbeat is no drain: it claims one issue after the other, each for a call of its agent.
    for name in DRAINED:
        ours = results.rate(name, "default")
        for peer, least in (("oban", 2.0), ("procrastinate", 2.0), ("pgqueuer", 1.0)):
            theirs = results.rate(peer, "default")
            if ours and theirs:
                found.append(Target(f"drained at defaults: {load(name).name} / {peer}", least, ours / theirs))
    if len(sizes := list(results.backlog)) > 1:
        few, many = (results.backlog[size]["claim_next"].p50_ms for size in (sizes[0], sizes[-1]))
        found.append(Target(f"claim_next, p50: at {sizes[0]:,} open issues / at {sizes[-1]:,}", 0.67, few / many))
    for name, held in results.snapshots.items():
        if name.startswith("webhooks"):
            found.append(Target(f"while a snapshot is held: {name} / before", 0.7, held.meanwhile / held.before))
    return found


def written(results: Results, given: Mapping[str, Any]) -> str:
    """Everything that was measured, as JSON."""
    found = {
        **given,
        "medians": {name: {mode: results.rate(name, mode) for mode in MODES} for name in results.drained},
        "targets": [{**asdict(target), "met": target.met} for target in targets(results)],
        **asdict(results),
    }
    return json.dumps(found, indent=2) + "\n"
