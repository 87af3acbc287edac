"""What tests of the patch flow share: deliveries made from real samples, applied to real rows."""

from __future__ import annotations

import copy
import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from handlers import consumer
from webhooks.apply import apply
from webhooks.consumer import Consumer
from webhooks.delivery import Delivery
from webhooks.inbox import inbox, insert
from webhooks.pool import Pool

PAYLOADS = Path(__file__).parent / "payloads"
SAMPLES = {str(file.relative_to(PAYLOADS)): json.loads(file.read_bytes()) for file in PAYLOADS.glob("*/*.json")}
PERSON = "6380d4da-0ae7-4ca5-a7f4-59ba335b4460"
BOT = "11111111-1111-4111-8111-111111111111"


def sample(name: str) -> Any:
    return copy.deepcopy(SAMPLES[name])


def labelled(sc_id: int = 5, label: str = "patch", title: str = "Retry failed exports") -> Delivery:
    """`story.update`: a label that is created with it is put on the story."""
    body = sample("shortcut/v1_story_update_label_add_new_label.json")
    body["actions"][0] |= {"id": sc_id, "name": title, "app_url": f"https://app.shortcut.com/acme/story/{sc_id}"}
    body["actions"][1]["name"] = label
    return shortcut_delivery(body)


def created(sc_id: int = 5, label: str = "patch") -> Delivery:
    """`story.create` with a label."""
    body = sample("shortcut/v1_story_create.json")
    body["actions"][0]["id"] = sc_id
    body["references"][3]["name"] = label
    return shortcut_delivery(body)


def commented(
    comment_id: int = 100,
    text: str | None = "Green.",
    author_id: str = PERSON,
    changed_at: str = "2026-06-12T10:00:00.004Z",
    sc_id: int = 5,
) -> Delivery:
    """`story-comment.create`."""
    body = sample("shortcut/v1_story_comment_create.json")
    body |= {"changed_at": changed_at, "member_id": author_id, "primary_id": comment_id}
    body["actions"][0] |= {"id": comment_id, "text": text, "author_id": author_id}
    body["actions"][0]["app_url"] = f"https://app.shortcut.com/acme/story/{sc_id}#activity-{comment_id}"
    del body["actions"][1]
    return shortcut_delivery(body)


def shortcut_delivery(body: Any) -> Delivery:
    body["id"] = str(uuid.uuid4())
    return Delivery("shortcut", body["id"], (), json.dumps(body).encode())


def pull_request(action: str, *, merged: bool = False, branch: str = "patch/sc-5", **changes: Any) -> Delivery:
    """`pull_request.<action>`; `changes` replace fields of the pull request."""
    body = sample(f"github/pull_request__{'closed' if action == 'reopened' else action}.json")
    body["action"] = action
    body["pull_request"]["head"]["ref"] = branch
    if action == "closed":
        body["pull_request"] |= {"merged": merged, "merged_at": "2026-06-12T12:00:00Z" if merged else None}
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = body["pull_request"]
        for parent in parents:
            place = place[parent]
        place[last] = value
    headers = (("x-github-event", "pull_request"),)
    return Delivery("github", f"1:{uuid.uuid4()}", headers, json.dumps(body).encode())


async def deliver(pool: Pool, *deliveries: Delivery, to: Consumer = consumer) -> list[dict[str, Any]]:
    """Store the deliveries in this order, apply each with whatever it wakes, and return how they ended."""
    for delivery in deliveries:
        async with pool.transaction() as tx:
            await insert(tx, [delivery])
        await apply_due(pool, to)
    return [row for delivery in deliveries for row in await endings(pool, delivery)]


async def apply_due(pool: Pool, to: Consumer = consumer) -> None:
    while claims := await inbox.take_next(pool, "applying", 10):
        for claim in claims:
            async with claim.held():
                await apply(to, claim)


async def endings(pool: Pool, delivery: Delivery) -> list[dict[str, Any]]:
    query = "SELECT status, reason, parked_on FROM deliveries WHERE dedup_key = %(key)s ORDER BY position"
    return await rows(pool, query, key=delivery.dedup_key)


async def rows(pool: Pool, query: Any, **params: object) -> list[dict[str, Any]]:
    async with pool.transaction() as tx:
        return await (await tx.execute(query, params)).fetchall()


async def session(pool: Pool, sc_id: int = 5) -> dict[str, Any]:
    (found,) = await rows(pool, "SELECT * FROM patch_sessions WHERE sc_id = %(sc_id)s", sc_id=sc_id)
    return found


async def put(pool: Pool, status: str, sc_id: int = 5, **columns: object) -> None:
    """Put the session there by hand, opening it if need be."""
    write = "INSERT INTO patch_sessions (sc_id, title, status) VALUES (%(sc_id)s, 'Retry failed exports', %(status)s)"
    again = "ON CONFLICT (sc_id) DO UPDATE SET status = excluded.status"
    async with pool.transaction() as tx:
        await tx.execute(f"{write} {again}", {"sc_id": sc_id, "status": status})
        for column, value in columns.items():
            update = f"UPDATE patch_sessions SET {column} = %(value)s WHERE sc_id = %(sc_id)s"  # noqa: S608
            await tx.execute(update, {"sc_id": sc_id, "value": value})


def texts(found: Sequence[dict[str, Any]]) -> list[tuple[str, str | None]]:
    return [(row["status"], row["reason"]) for row in found]
