"""What was restored from a dump of another server, put where followers can get it.

A dump keeps the numbers of the transactions in which deliveries were accepted; the server it is restored on counts its
own. A delivery with a number that this server has not come to yet would be held back until it does, perhaps for years.
Nobody was served it here, so it may get a new number: that of the transaction which says so.
"""

from __future__ import annotations

from webhooks.db import Transaction, compose
from webhooks.feed.reading import FEED

MOST_AT_ONCE = 1_000
# One process at a time: another's numbers, which a statement that was waiting does not know, look like foreign ones.
TURN = "SELECT pg_try_advisory_xact_lock(7742301953811267) AS ours"
# All that a statement sees and was accepted here committed below the highest number its snapshot knows. What its own
# transaction wrote may lie past that, so one transaction puts one batch behind.
PUT_BEHIND = compose(
    "UPDATE {deliveries} SET accepted_xid = pg_current_xact_id() WHERE id IN (\n"
    "    SELECT id FROM {deliveries}\n"
    "    WHERE accepted_xid >= pg_snapshot_xmax(pg_current_snapshot()) AND {feed}\n"
    "    ORDER BY accepted_xid, id LIMIT %(most)s\n"
    ")",
    feed=FEED,
)


async def put_behind(tx: Transaction) -> int:
    """Give some deliveries with the numbers of another server new ones; call it until there are none.

    Args:
        tx: a transaction that does nothing else.

    Returns:
        How many got one; none as well while another process does this.
    """
    turn = await (await tx.execute(TURN)).fetchone()
    if turn is None or not turn["ours"]:
        return 0
    return (await tx.execute(PUT_BEHIND, {"most": MOST_AT_ONCE})).rowcount
