"""Two versions of one application, for a rolling deploy: `--app versions:old` and `--app versions:new`.

Both handle `push`; only the old one `fork`, only the new one `release`, and the source `shortcut` is the new one's.
"""

from __future__ import annotations

import os

from webhooks import Consumer, Event, GitHub, Shortcut, Transaction

APPLIED = "CREATE TABLE applied (delivery bigint NOT NULL, event text NOT NULL, pid integer NOT NULL)"


async def note(event: Event, tx: Transaction) -> None:
    values = {"delivery": event.delivery, "event": event.name, "pid": os.getpid()}
    await tx.execute("INSERT INTO applied VALUES (%(delivery)s, %(event)s, %(pid)s)", values)


def github(*events: str) -> GitHub:
    source = GitHub()
    for event in events:
        source.on(event)(note)
    return source


shortcut = Shortcut()
shortcut.on("story.update")(note)

old = Consumer(gates=[], sources=[github("push", "fork")])
new = Consumer(gates=[], sources=[github("push", "release"), shortcut])
