"""The description of the JSON API is valid, complete and true: every operation's real answers are held against it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import httpx
import pytest
import shop
from consumers import SECRET, Stack, digest, stack, stories
from jsonschema import Draft202012Validator, FormatChecker
from openapi_spec_validator import validate
from test_control import after_some_work, asking

from webhooks.rejections import Rejection, store


class Description:
    """The description that a control plane gives, and answers held against it."""

    def __init__(self, document: dict[str, Any], client: httpx.AsyncClient) -> None:
        self.document = document
        self.client = client
        self.held: set[tuple[str, str, str]] = set()

    def nothing_is_left_out(self) -> None:
        described = {
            (method.upper(), path, status)
            for path, methods in self.document["paths"].items()
            for method, operation in methods.items()
            for status, told in operation["responses"].items()
            if status != "default" and "application/json" in told["content"]
        }
        assert described <= self.held, "hold an answer of each against its description"

    async def holds(self, method: str, path: str, url: str, status: int, body: object = None) -> Any:
        """Ask, and hold the answer against what the description says of it."""
        content = None if body is None else json.dumps(body).encode()
        answer = await self.client.request(method, url, content=content)
        assert answer.status_code == status, answer.text
        responses = self.document["paths"][path][method.lower()]["responses"]
        told = responses.get(str(status)) or responses["default"]
        schema = told["content"]["application/json"]["schema"]
        whole = {**schema, "components": self.document["components"]}
        errors = sorted(Draft202012Validator(whole, format_checker=FormatChecker()).iter_errors(answer.json()), key=str)
        assert not errors, f"{method} {url}: {errors[0].json_path}: {errors[0].message}"
        self.held.add((method, path, str(status) if str(status) in responses else "default"))
        return answer.json()


async def refused(running: Stack, other: bytes = b"\xff") -> None:
    """Two requests that were refused, of which one is right by the secret in force."""
    body = stories(9)
    now = time.time()
    rejections = [
        Rejection(
            source="shortcut",
            cause="bad_signature",
            headers=(("payload-signature", digest(body, secret)),),
            body=sent,
            body_bytes=len(sent),
            body_sha256=b"x",
            received_at=now,
            last_at=now,
        )
        for secret, sent in ((SECRET, body), ("another secret", other))
    ]
    async with running.pool.transaction() as tx:
        await store(tx, rejections)


async def test_the_hints_of_many_refused_requests_are_worked_out_one_at_a_time_beside_the_loop(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEBHOOKS_SECRET_SHORTCUT", SECRET)
    async with after_some_work(database_url) as (running, client):
        await refused(running, json.dumps(["/<é"] * 40_000).encode())
        before = {*threading.enumerate()}
        looks = [client.get("/api/rejections/2") for _ in range(5)]
        answers = await asyncio.gather(*looks)
        assert all(answer.json()["hints"] for answer in answers)
        assert len([new for new in {*threading.enumerate()} - before if new.name.startswith("hints")]) == 1


async def replays_hold(told: Description) -> None:
    path = "/api/replays"
    plan = (await told.holds("POST", path, path, 200, {"disposition": "processed"}))["plan"]
    assert (plan["total"], len(plan["sample"])) == (1, 1)
    done = await told.holds("POST", path, path, 200, {"disposition": "processed", "yes": True, "by": "Ann"})
    assert (done["by"], done["report"]["counts"], done["error"]) == ("Ann", {"again": 1}, None)
    asked = {"source": "shortcut", "as": "new", "yes": True, "wait": False}
    begun = await told.holds("POST", path, path, 202, asked)
    stop = "/api/replays/{id}/stop"
    await told.holds("POST", stop, f"/api/replays/{begun['id']}/stop", 202)
    await told.holds("POST", stop, "/api/replays/999/stop", 404)
    await told.holds("GET", "/api/replays/{id}", f"/api/replays/{begun['id']}", 200)
    listed = (await told.holds("GET", path, path, 200))["replays"]
    assert [one["id"] for one in listed] == [begun["id"], done["id"]]
    for body in ({}, {"as": "other", "all": True}, {"where_json": ["no path"]}, {"ids": [999]}):
        await told.holds("POST", path, path, 400, body)


async def test_the_description_is_valid_openapi_and_names_each_operation_once(database_url: str) -> None:
    async with stack(database_url, shop.consumer, work=False) as running, asking(running, shop.consumer) as client:
        document = (await client.get("/api/openapi.json")).json()
    validate(document)
    operations = [operation for methods in document["paths"].values() for operation in methods.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)


async def test_every_answer_is_as_described(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEBHOOKS_SECRET_SHORTCUT", SECRET)
    async with after_some_work(database_url) as (running, client):
        await running.sql(
            "INSERT INTO attempts (claim_seq, table_name, key, phase, visit, attempt, claimed_by, claimed_at, ended_at,"
            " outcome, error) SELECT 99999, 'patch_sessions', '5', 'drafting', visit, 1, 'x', now(), now(), 'error', ''"
            " FROM patch_sessions WHERE sc_id = 5"
        )
        await running.sql(
            "INSERT INTO effects (idempotency_key, claim_seq, state, input_hash, result, call_until,"
            " ended_at)"
            " VALUES ('patch_sessions:5:drafting:1:call', 99999, 'done', '', '1', now(), now())"
        )
        told = Description((await client.get("/api/openapi.json")).json(), client)
        await told.holds("GET", "/api/status", "/api/status", 200)
        rows = (await told.holds("GET", "/api/deliveries", "/api/deliveries", 200))["deliveries"]
        assert len(rows) == 4
        await told.holds("GET", "/api/deliveries", "/api/deliveries?limit=0", 400)
        for row in rows:
            await told.holds("GET", "/api/deliveries/{id}", f"/api/deliveries/{row['id']}", 200)
        await told.holds("GET", "/api/deliveries/{id}", "/api/deliveries/999", 404)
        await told.holds("GET", "/api/feed/waiting", "/api/feed/waiting?after=1h&source=shortcut", 200)
        await told.holds("GET", "/api/feed", "/api/feed?after=yesterday", 400)
        found = (await told.holds("GET", "/api/escalations", "/api/escalations", 200))["escalations"]
        assert any(one["attempts"] and one["effects"] for one in found)
        why = "/api/why/{table}/{key}"
        await told.holds("GET", why, "/api/why/patch_sessions/5", 200)
        await told.holds("GET", why, "/api/why/patch_sessions/99", 404)
        await told.holds("GET", why, "/api/why/nothing/1", 404)
        asked = {"row": "patch_sessions:5", "reason": "looked"}
        await told.holds("POST", "/api/retry", "/api/retry", 200, asked)
        await told.holds("POST", "/api/retry", "/api/retry", 409, asked)
        await told.holds("POST", "/api/resolve", "/api/resolve", 200, {**asked, "row": "deliveries:3", "to": "ignored"})
        await refused(running)
        rejected = (await told.holds("GET", "/api/rejections", "/api/rejections", 200))["rejections"]
        for row in rejected:
            await told.holds("GET", "/api/rejections/{id}", f"/api/rejections/{row['id']}", 200)
        await told.holds("GET", "/api/rejections/{id}", "/api/rejections/999", 404)
        kinds = (await told.holds("GET", "/api/rejections/kinds", "/api/rejections/kinds?since=1h", 200))["kinds"]
        assert kinds
        assert all(kind["hints"] for kind in kinds)
        again = "/api/rejections/reverify"
        dry = await told.holds("POST", again, again, 200, {})
        done = await told.holds("POST", again, again, 200, {"yes": True, "source": "shortcut"})
        assert [one["outcome"] for one in dry["rejections"]] == [one["outcome"] for one in done["rejections"]]
        assert {one["outcome"] for one in done["rejections"]} == {"accepted", "refused"}
        await told.holds("POST", again, again, 400, {"ids": "all"})
        await replays_hold(told)
        told.nothing_is_left_out()
