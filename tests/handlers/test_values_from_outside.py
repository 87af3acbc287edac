"""What no column can hold, and what is no id at all: the delivery is dead at once, and says which field it was."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from consumers import quick
from issue_events import all_issues, assigned, event
from patch_flow import commented, deliver, labelled, pull_request, rows, sample, shortcut_delivery, texts
from pydantic import ValidationError

from handlers import consumer
from webhooks import Pool
from webhooks.delivery import Delivery

NO_IDS: list[Any] = [2**63, -1, 0, True, 1.0, "7", None, [7]]
TOO_LONG = "x" * 600


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[Pool]:
    async with Pool.open(database_url, settings=quick()) as pool:
        yield pool


def changed(delivery: Delivery, path: str, value: object) -> Delivery:
    """The delivery with another value at `a.b.0.c`."""
    body: Any = json.loads(delivery.body)
    *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
    place = body
    for parent in parents:
        place = place[parent]
    place[last] = value
    return Delivery(delivery.source, delivery.dedup_key, delivery.headers, json.dumps(body).encode())


def refused(delivery: Delivery, field: str) -> None:
    """Reading it for its handler fails, and says which field it was."""
    source = consumer.sources[delivery.source]
    said = source.events(delivery.headers, source.read(delivery.headers, delivery.body))[0]
    model = source.handlers[said.name].model
    assert model is not None
    with pytest.raises(ValidationError) as refusal:
        model.model_validate(said.data)
    places = {".".join(map(str, fault["loc"])) for fault in refusal.value.errors()}
    assert field in places


@pytest.mark.parametrize(
    ("delivery", "field", "value"),
    [
        (assigned("coder"), "issue.number", 2**63),
        (assigned("coder"), "repository.id", True),
        (assigned("coder"), "repository.full_name", "a\0b/c"),
        (labelled(), "actions.0.id", -1),
        (commented(), "actions.0.id", 2**70),
        (pull_request("closed"), "pull_request.base.repo.full_name", "a/b\ud800"),
    ],
)
async def test_it_is_dead_at_once_and_names_the_field(
    pool: Pool, delivery: Delivery, field: str, value: object
) -> None:
    await deliver(pool, changed(delivery, field, value))
    [row] = await rows(pool, "SELECT * FROM deliveries")
    assert (row["status"], row["attempt_count"]) == ("dead", 1)
    assert f" {field.removeprefix('actions.0.')}: " in row["last_error"]


@pytest.mark.parametrize("value", NO_IDS, ids=repr)
@pytest.mark.parametrize("field", ["issue.number", "repository.id"])
def test_a_number_of_an_issue_or_a_repository(field: str, value: object) -> None:
    refused(changed(assigned("coder"), field, value), field)


@pytest.mark.parametrize("value", NO_IDS, ids=repr)
def test_a_number_of_a_repository_that_is_renamed(value: object) -> None:
    body = sample("github/repository__renamed.json")
    renaming = Delivery("github", "1:1", (("x-github-event", "repository"),), json.dumps(body).encode())
    refused(changed(renaming, "repository.id", value), "repository.id")


@pytest.mark.parametrize("value", NO_IDS, ids=repr)
def test_a_number_of_a_story(value: object) -> None:
    refused(changed(labelled(), "actions.0.id", value), "id")


@pytest.mark.parametrize("value", [number for number in NO_IDS if number not in ("7", [7])], ids=repr)
def test_a_number_of_a_label(value: object) -> None:
    delivery = changed(labelled(), "actions.0.changes.label_ids.adds", [value])
    refused(delivery, "changes.label_ids.adds.0.constrained-int")


@pytest.mark.parametrize("value", NO_IDS, ids=repr)
def test_a_number_of_a_comment(value: object) -> None:
    refused(changed(commented(), "actions.0.id", value), "id")


def test_a_comment_on_a_story_of_no_number() -> None:
    url = {"app_url": "https://app.shortcut.com/acme/story/0#activity-100", "story_id": -5}
    delivery = changed(commented(), "actions.0", json.loads(commented().body)["actions"][0] | url)
    refused(delivery, "story_id")


@pytest.mark.parametrize("value", NO_IDS, ids=repr)
@pytest.mark.parametrize("field", ["pull_request.number", "pull_request.base.repo.id", "pull_request.head.repo.id"])
def test_a_number_of_a_pull_request(field: str, value: object) -> None:
    refused(changed(pull_request("closed"), field, value), field)


@pytest.mark.parametrize("value", ["a\0b/c", "a/b\ud800", "a/b/c", "", "ab", "a/" + TOO_LONG, 7, None], ids=repr)
@pytest.mark.parametrize(
    ("delivery", "field"),
    [
        (assigned("coder"), "repository.full_name"),
        (pull_request("closed"), "pull_request.base.repo.full_name"),
    ],
)
def test_a_name_of_a_repository(delivery: Delivery, field: str, value: object) -> None:
    refused(changed(delivery, field, value), field)


@pytest.mark.parametrize(
    ("delivery", "field"),
    [
        (assigned(TOO_LONG), "issue.assignees.0.login"),
        (event("labeled", labels=["agent:" + TOO_LONG]), "issue.labels.0.name"),
    ],
)
def test_a_name_that_no_index_takes(delivery: Delivery, field: str) -> None:
    refused(delivery, field)


def test_a_time_of_no_zone() -> None:
    delivery = changed(event("closed"), "issue.closed_at", "2026-06-12T10:00:00")
    refused(delivery, "issue.closed_at")


async def test_nul_in_a_name_that_is_only_shown_is_replaced(pool: Pool) -> None:
    assert texts(await deliver(pool, assigned("co\0der", title="a\0b"))) == [("processed", None)]
    [row] = await all_issues(pool)
    assert (row["assigned_agent_id"], row["title"]) == ("co\ufffdder", "a\ufffdb")


async def test_the_greatest_number_that_a_column_holds_is_one(pool: Pool) -> None:
    most = 2**63 - 1
    delivery = changed(changed(assigned("coder"), "issue.number", most), "repository.id", most)
    assert texts(await deliver(pool, delivery)) == [("processed", None)]
    assert texts(await deliver(pool, changed(labelled(), "actions.0.id", most))) == [("processed", None)]


# Labels that are named only by their number


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ({}, "18 (the body does not say its name), 7 (the body does not say its name)"),
        ({18: "bug"}, "bug, 7 (the body does not say its name)"),
        ({18: "bug", 7: "docs"}, "bug, docs"),
    ],
)
async def test_a_label_whose_name_the_body_does_not_say_is_told_as_that(
    pool: Pool, names: dict[int, str], reason: str
) -> None:
    body = sample("shortcut/v1_story_update_state_change.json")
    body["actions"][0]["changes"] = {"label_ids": {"adds": [18, 7]}}
    body["references"] = [{"id": id, "entity_type": "label", "name": name} for id, name in names.items()]
    found = texts(await deliver(pool, shortcut_delivery(body)))
    assert found == [("ignored", f"label 'patch' not among those added: {reason}")]
