"""One tunnel from a feed, from its start to its end: what comes is posted, told, and then the place moves on."""

from __future__ import annotations

from contextlib import aclosing
from typing import Literal

from webhooks.errors import WebhooksError
from webhooks.sending import Answer
from webhooks.tunnel.bookmark import Bookmark
from webhooks.tunnel.follower import Follower
from webhooks.tunnel.items import Arrived, Pruned, Standing
from webhooks.tunnel.reasons import fault
from webhooks.tunnel.relay import Incoming, Relay, taken
from webhooks.tunnel.report import Report

OnError = Literal["stop", "skip"]


class Stopped(WebhooksError):
    """The local receiver refused a delivery, and `--on-error` says to stop there.

    Args:
        message: which, and why.
        advice: what a person may do, each in a line; they are the error's notes.
    """

    def __init__(self, message: str, *advice: str) -> None:
        super().__init__(message)
        for line in advice:
            self.add_note(line)


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
        Stopped: it refused one; it says which, why, and how to go on.
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
                        raise _stopped(item, answer, relay)
            kept.keep(item.cursor)


def _stopped(item: Arrived, answer: Answer, relay: Relay) -> Stopped:
    delivery = item.delivery
    return Stopped(
        f"stopped at {delivery.source} #{delivery.id}: {relay.base} refused it ({fault(answer)})",
        *_advice(delivery, answer, relay),
        "started again without --since, the tunnel goes on with this delivery",
        f"to leave it out: --since {item.cursor}; to leave out all that are refused: --on-error skip",
    )


def _advice(delivery: Incoming, answer: Answer, relay: Relay) -> list[str]:
    """Return what a person may do about a refusal, as far as its cause is known."""
    name, signed_here = delivery.source, relay.signer is not None
    match answer.cause:
        case "bad_signature" if signed_here:
            return [f"it was signed anew, with a secret of {name} that is not the receiver's: are they set alike here?"]
        case "bad_signature":
            return [
                "the receiver here has another secret than the deployed one: --resign signs with the one known here"
            ]
        case "stale_timestamp" if not signed_here:
            return ["its signed time is too old by now: --resign signs anew, with the secret known here"]
        case "missing_signature" if not signed_here:
            return ["it was stored without a signature: --resign signs it with the secret known here"]
        case "unknown_source":
            return [f"the consumer here has no source {name}: name those that it has with --source"]
        case _ if answer.status == 404:
            return [f"is {relay.base} the address of a receiver, and not that of a control plane?"]
        case _:
            return []
