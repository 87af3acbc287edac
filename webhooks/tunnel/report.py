"""What a tunnel says: one line a delivery, and what it comes to at the end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from webhooks.errors import Unreadable
from webhooks.feed import MOST_COUNTED
from webhooks.sending import Answer
from webhooks.sources import Source
from webhooks.tunnel.reasons import said
from webhooks.tunnel.relay import Incoming, Tell

MOST_READ = 1024 * 1024
MOST_NAMES = 3
MOST_OF_A_NAME = 200
HEADERS = ("x-github-event", "x-event-key", "x-gitlab-event")
WORTH_SAYING_S = 5.0


def named(sources: Mapping[str, Source], incoming: Incoming) -> str:
    """Return what a delivery says, as far as that is cheap to know; `-` where it is not."""
    return _named(sources, incoming)[:MOST_OF_A_NAME]


def _named(sources: Mapping[str, Source], incoming: Incoming) -> str:
    if incoming.event is not None:
        return incoming.event
    source = sources.get(incoming.source)
    if source is not None and len(incoming.body) <= MOST_READ:
        try:
            events = source.events(incoming.headers, source.read(incoming.headers, incoming.body))
        except Unreadable:
            events = []
        names = list(dict.fromkeys(event.name for event in events))
        if names:
            return ", ".join(names[:MOST_NAMES]) + (", …" if len(names) > MOST_NAMES else "")
    return next((value for name, value in incoming.headers if name in HEADERS), "-")


def ago(moment: datetime) -> str:
    """Return how long ago something was, in the two largest units."""
    return lasted(datetime.now(UTC) - moment)


def lasted(duration: timedelta) -> str:
    """Return a length of time in its two largest units."""
    seconds = max(int(duration.total_seconds()), 0)
    units = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))
    parts: list[str] = []
    for name, size in units:
        number, seconds = divmod(seconds, size)
        if number or (name == "s" and not parts):
            parts.append(f"{number} {name}")
    return " ".join(parts[:2])


@dataclass(slots=True)
class Report:
    """Tells a person what happens.

    Args:
        tell: where each line goes; what senders wrote is in it.
        sources: those known here, to name events.
    """

    tell: Tell
    sources: Mapping[str, Source]
    counts: Counter[str] = field(default_factory=Counter[str])
    started: float = field(default_factory=time.monotonic)

    def standing(self, waiting: int | None, since: datetime | None, held_back: int, held_s: float) -> None:
        """Say what waits on the other side, and what is held back there."""
        if waiting:
            many = f"{waiting} or more" if waiting >= MOST_COUNTED else str(waiting)
            first = f", the first since {local(since)} ({ago(since)})" if since is not None else ""
            self.tell(f"{many} waiting{first}")
        elif waiting == 0:
            self.tell("nothing is waiting")
        if held_back and held_s >= WORTH_SAYING_S:
            self.tell(
                f"{held_back} more are held back there, for {held_s:.0f} s by now: a transaction is open on that "
                "database server, and they come when it ends"
            )

    def passed(self, incoming: Incoming, answer: Answer) -> None:
        self.counts["duplicate" if answer.outcome in ("duplicate", "rearmed") else "new"] += 1
        unread = "" if answer.unread is None else f" (by its status; its answer could not be read: {answer.unread})"
        self._line(incoming, answer, f"{answer.outcome}{unread}")

    def skipped(self, incoming: Incoming, answer: Answer) -> None:
        self.counts["skipped"] += 1
        self._line(incoming, answer, ": ".join(part for part in ("skipped", said(answer)) if part))

    def pruned(self, source: str, id: int, received_at: datetime) -> None:
        self.counts["pruned"] += 1
        what = f"{source}  #{id} of {local(received_at)}"
        self.tell(f"{clock()}  {what} cannot be passed on: its body was pruned there")

    def _line(self, incoming: Incoming, answer: Answer, became: str) -> None:
        number = "" if incoming.id is None else f"#{incoming.id} "
        here = "" if answer.delivery is None else f", delivery {answer.delivery} here"
        status = "no answer" if answer.status is None else str(answer.status)
        what = f"{incoming.source}  {named(self.sources, incoming)}  {number}→ {status} {became}{here}"
        self.tell(f"{clock()}  {what}  {answer.seconds * 1000:.0f} ms")

    def summary(self, connections: int) -> str:
        """Return what it came to, over so many connections."""
        new, duplicate = self.counts["new"], self.counts["duplicate"]
        parts = [f"passed on {new + duplicate}" + (f" ({new} new, {duplicate} were here already)" if duplicate else "")]
        parts += [f"{self.counts[name]} {name}" for name in ("skipped", "pruned") if self.counts[name]]
        over = f" over {connections} connections" if connections > 1 else ""
        return f"{', '.join(parts)}, in {lasted(timedelta(seconds=time.monotonic() - self.started))}{over}"


def local(moment: datetime) -> str:
    return moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def clock() -> str:
    return datetime.now().astimezone().strftime("%H:%M:%S")
