"""Who asks a provider to deliver something again: one run at a time, noted before it asks.

The claim of a guid is one statement, and its row count the answer. It is committed before the call and holds no lock
during it; a run that died in between leaves a claim that another one takes over a minute later.
"""

from __future__ import annotations

from datetime import timedelta

from webhooks.db import Transaction, compose, table

AGAIN_AFTER = timedelta(minutes=5)
TAKE_OVER_AFTER = timedelta(minutes=1)
"""How long whoever claims may take to ask: more than `ask_again` takes with all its repetitions."""
LONGEST_WAIT = timedelta(hours=6)
FORGET_AFTER = timedelta(days=30)

CLAIM = compose(
    "INSERT INTO {redeliveries} AS r (scope, guid) VALUES (%(scope)s, %(guid)s)\n"
    "ON CONFLICT (scope, guid) DO UPDATE\n"
    "    SET asked_at = statement_timestamp(), answered = false, times = r.times + 1\n"
    "WHERE r.asked_at <= statement_timestamp() - CASE WHEN NOT r.answered THEN %(take_over)s::interval\n"
    "    ELSE least(%(again)s::interval * power(%(factor)s::float8, least(r.times - 1, 30)), %(longest)s) END",
    redeliveries=table("redeliveries"),
)
ANSWERED = compose(
    "UPDATE {redeliveries} SET answered = true WHERE scope = %(scope)s AND guid = %(guid)s",
    redeliveries=table("redeliveries"),
)
GIVE_BACK = compose(
    "UPDATE {redeliveries} SET asked_at = statement_timestamp() - %(take_over)s::interval\n"
    "WHERE scope = %(scope)s AND guid = %(guid)s AND NOT answered",
    redeliveries=table("redeliveries"),
)
FORGET = compose(
    "DELETE FROM {redeliveries} WHERE scope = %(scope)s AND asked_at < statement_timestamp() - %(after)s::interval",
    redeliveries=table("redeliveries"),
)


async def claim(tx: Transaction, scope: str, guid: str, *, growing: bool = False) -> bool:
    """Claim the right to ask for a delivery again, unless somebody asked within the last minutes.

    Args:
        tx: committed before the provider is asked.
        scope: whose delivery log.
        guid: which delivery.
        growing: double the wait each time, up to six hours: for a schedule, where nobody sees that it never arrives.
    """
    params = {
        "scope": scope,
        "guid": guid,
        "again": AGAIN_AFTER,
        "take_over": TAKE_OVER_AFTER,
        "longest": LONGEST_WAIT,
        "factor": 2 if growing else 1,
    }
    return (await tx.execute(CLAIM, params)).rowcount == 1


async def answered(tx: Transaction, scope: str, guid: str) -> None:
    """Note that the provider agreed, so that it is not asked again for a while."""
    await tx.execute(ANSWERED, {"scope": scope, "guid": guid})


async def give_back(tx: Transaction, scope: str, guid: str) -> None:
    """Let anybody ask at once: the provider certainly was not asked."""
    await tx.execute(GIVE_BACK, {"scope": scope, "guid": guid, "take_over": TAKE_OVER_AFTER})


async def forget(tx: Transaction, scope: str) -> None:
    """Drop what was asked for long ago: no provider keeps anything for so long."""
    await tx.execute(FORGET, {"scope": scope, "after": FORGET_AFTER})
