"""One tunnel from a feed, from its start to its end: what comes is posted, told, and then the place moves on."""

from __future__ import annotations

from contextlib import aclosing
from typing import Literal

from webhooks.errors import WebhooksError
from webhooks.sending import Answer
from webhooks.tunnel.bookmark import Bookmark
from webhooks.tunnel.follower import Follower
from webhooks.tunnel.items import Arrived, Pruned, Standing
from webhooks.tunnel.relay import Incoming, Relay, taken
from webhooks.tunnel.report import Report, in_line

OnError = Literal["stop", "skip"]


class Stopped(WebhooksError):
    """The local receiver refused a delivery, and `--on-error` says to stop there."""


async def carry(follower: Follower, relay: Relay, kept: Bookmark, report: Report, on_error: OnError = "stop") -> None:
    """Pass on what comes, one after the other, until cancelled.

    The place moves behind a delivery only when it was taken, or is skipped because that was asked for.

    Args:
        follower: where deliveries come from.
        relay: where they go.
        kept: the place on disk.
        report: who is told.
        on_error: what to do when the local receiver finally refuses one.

    Raises:
        Stopped: it refused one; the message says which, why, and how to go on.
        WebhooksError: the feed is not served to us, or the place cannot be kept.
    """
    async with aclosing(follower.items()) as items:
        async for item in items:
            match item:
                case Standing():
                    report.standing(item.waiting, item.since, item.held_back, item.held_s)
                case Pruned():
                    report.pruned(item.source, item.id, item.received_at)
                case Arrived():
                    answer = await relay.post(item.delivery)
                    if taken(answer):
                        report.passed(item.delivery, answer)
                    elif on_error == "skip":
                        report.skipped(item.delivery, answer)
                    else:
                        raise Stopped(_stopped(item, answer, relay))
            kept.keep(item.cursor)


def _stopped(item: Arrived, answer: Answer, relay: Relay) -> str:
    delivery = item.delivery
    lines = [
        f"stopped at {in_line(delivery.source)} #{delivery.id}: {relay.base} refused it "
        f"({answer.status or 'it could not be sent'}: {in_line(str(answer.cause))})",
        *advice(delivery, answer, relay),
        "started again, the tunnel goes on with this delivery",
        f"to leave it out: --since {item.cursor}; to leave out all that are refused: --on-error skip",
    ]
    return "\n  ".join(lines)


def advice(delivery: Incoming, answer: Answer, relay: Relay) -> list[str]:
    """Return what a person may do about a refusal, as lines; none where nothing is known."""
    name = in_line(delivery.source)
    if answer.status == 401 and relay.signer is None:
        return [
            "the receiver here has another secret than the deployed one, or finds a signed time too old:",
            "--resign signs with the secret known here",
        ]
    if answer.status == 401:
        return [f"it was signed anew, with a secret of {name} that is not the receiver's: are they set alike here?"]
    if answer.status == 404:
        return [f"the consumer here has no source {name}: name those that it has with --source"]
    return []
