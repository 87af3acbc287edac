"""Agents: their settings, what is sent to them, and what each kind of answer means for the issue."""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import respx
from consumers import quick
from heartbeats import attempts_of, due, enter, issue_of, open_issue, outcomes_of, run, sql

from handlers.agent_calls import MAX_ANSWER_BYTES
from handlers.agents import Agent, HttpAdapter, ProcessAdapter, read_agents
from handlers.texts import json_text, storable
from webhooks import Pool

URL = "https://agent.example/work"
HTTP: dict[str, object] = {"type": "http", "url": URL}
Answer = Callable[[httpx.Request], httpx.Response]


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[Pool]:
    async with Pool.open(database_url, settings=quick()) as pool:
        yield pool


async def asked(pool: Pool, adapter: dict[str, object], **columns: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """One issue of a company of its own, given to an agent: the row and its attempt afterwards."""
    company = str(uuid.uuid4())
    await enter(pool, {"coder": adapter}, company=company)
    id = await open_issue(pool, company=company, **columns)
    await run(pool, company=company)
    [attempt] = await attempts_of(pool, id)
    return await issue_of(pool, id), attempt


async def asked_again(pool: Pool, row: dict[str, Any]) -> dict[str, int]:
    """Its back-off is over, and the next heartbeat comes."""
    await due(pool)
    return await run(pool, company=row["company_id"])


async def effect_of(pool: Pool, row: dict[str, Any]) -> str:
    key = f"issues:{row['id']}:claimed:{row['visit']}:agent"
    [effect] = await sql(pool, "SELECT state FROM effects WHERE idempotency_key = %(key)s", key=key)
    return str(effect["state"])


# Settings


def test_an_adapter_needs_only_its_type_and_where_the_agent_is() -> None:
    agents, problems = read_agents(
        [
            {"id": "a", "adapter": HTTP},
            {"id": "b", "adapter": {"type": "process", "command": ["agent", "--fast"]}},
        ]
    )
    assert problems == []
    assert agents == [
        Agent("a", HttpAdapter.model_validate({**HTTP, "timeout_s": 300, "concurrency": 1})),
        Agent("b", ProcessAdapter(type="process", command=["agent", "--fast"])),
    ]


@pytest.mark.parametrize(
    ("adapter", "complaint"),
    [
        (None, "type: "),
        ("http", "type: "),
        ({}, "type: Unable to extract tag"),
        ({"type": "ftp"}, "type: Input tag 'ftp' found"),
        ({"type": "http"}, "url: Field required"),
        ({"type": "http", "url": "agent.example"}, "url: Input should be a valid URL"),
        ({"type": "http", "url": "file:///etc/passwd"}, "url: URL scheme should be 'http' or 'https'"),
        ({**HTTP, "timeout": 5}, "timeout: Extra inputs are not permitted"),
        ({**HTTP, "timeout_s": 0}, "timeout_s: Input should be greater than 0"),
        ({**HTTP, "timeout_s": 3601}, "timeout_s: Input should be less than or equal to 3600"),
        ({**HTTP, "concurrency": 0}, "concurrency: Input should be greater than or equal to 1"),
        ({**HTTP, "headers": {"X Y": "z"}}, "headers.X Y.[key]: String should match pattern"),
        ({**HTTP, "headers": {"X-Y": "a\r\nZ: b"}}, "headers.X-Y: String should match pattern"),
        ({"type": "process", "command": []}, "command: List should have at least 1 item"),
        ({"type": "process", "command": "agent --fast"}, "command: Input should be a valid list"),
    ],
)
def test_settings_that_cannot_be_read_are_named_with_the_reason(adapter: object, complaint: str) -> None:
    agents, [problem] = read_agents([{"id": "coder", "adapter": adapter}])
    assert agents == []
    assert problem.startswith(f"agent coder: its adapter cannot be read: {complaint}")


def test_a_wrong_setting_is_named_without_the_secrets_beside_it() -> None:
    adapter = {**HTTP, "headers": {"Authorization": "Bearer hush\n"}}
    _, [problem] = read_agents([{"id": "coder", "adapter": adapter}])
    assert "hush" not in problem


# What is sent


@respx.mock
async def test_an_issue_is_posted_as_json_with_the_idempotency_key_and_what_the_settings_say(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CODER_TOKEN", "hush")
    route = respx.post(URL).respond(json={"ok": True})
    row, attempt = await asked(
        pool,
        {**HTTP, "headers": {"X-Team": "blue"}, "token_env": "CODER_TOKEN"},
        title="Umlaute äöü",
        body="…",
        priority="high",
        external_ref="tracker-7",
    )
    [call] = route.calls
    key = f"issues:{row['id']}:claimed:{row['visit']}:agent"
    assert call.request.headers["idempotency-key"] == key
    assert call.request.headers["authorization"] == "Bearer hush"
    assert call.request.headers["x-team"] == "blue"
    assert call.request.headers["content-type"] == "application/json"
    assert json.loads(call.request.content) == {
        "id": row["id"],
        "company_id": row["company_id"],
        "assigned_agent_id": "coder",
        "title": "Umlaute äöü",
        "body": "…",
        "priority": "high",
        "created_at": row["created_at"].isoformat().replace("+00:00", "Z"),
        "external_ref": "tracker-7",
        "attempt": 1,
        "claim": attempt["claim_seq"],
        "idempotency_key": key,
    }
    assert (row["status"], row["result"]) == ("resolved", '{"ok": true}')


@respx.mock
async def test_every_attempt_sends_the_same_key_whatever_has_been_changed_meanwhile(pool: Pool) -> None:
    route = respx.post(URL).mock(side_effect=[httpx.Response(500), httpx.Response(200, json=1)])
    row, _ = await asked(pool, HTTP)
    await sql(pool, "UPDATE issues SET priority = 'critical'")
    await sql(pool, "UPDATE agents SET name = 'another', adapter = adapter || '{\"timeout_s\": 5}'")
    assert (await asked_again(pool, row))["resolved"] == 1
    first, second = route.calls
    assert first.request.headers["idempotency-key"] == second.request.headers["idempotency-key"]
    assert [json.loads(call.request.content)["attempt"] for call in route.calls] == [1, 2]
    assert (await issue_of(pool, row["id"]))["attempt_count"] == 2


@respx.mock
async def test_another_text_under_the_same_key_is_not_sent_but_a_person_asked(pool: Pool) -> None:
    route = respx.post(URL).respond(500)
    row, _ = await asked(pool, HTTP)
    await sql(pool, "UPDATE issues SET body = 'something else'")
    assert (await asked_again(pool, row))["escalated"] == 1
    assert len(route.calls) == 1
    assert "other arguments" in (await issue_of(pool, row["id"]))["last_error"]


async def test_a_token_that_is_not_set_is_asked_for(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CODER_TOKEN", raising=False)
    row, _ = await asked(pool, {**HTTP, "token_env": "CODER_TOKEN"})
    assert (row["status"], row["last_error"]) == (
        "escalated",
        "agent coder: set CODER_TOKEN: agent coder is called with it",
    )


# What an answer means


@respx.mock
async def test_2xx_with_json_resolves(pool: Pool) -> None:
    for status in (200, 201, 299):
        respx.post(URL).respond(status, content=b'"done"')
        row, attempt = await asked(pool, HTTP)
        assert (row["status"], row["result"], attempt["outcome"]) == ("resolved", '"done"', "done")


@respx.mock
async def test_a_refusal_escalates_at_once_and_can_be_asked_again_by_a_person(pool: Pool) -> None:
    for status in (301, 307, 400, 401, 403, 404, 409, 422):
        respx.post(URL).respond(status, text="no, never", headers={"location": "https://elsewhere.example"})
        row, attempt = await asked(pool, HTTP)
        assert (row["status"], row["attempt_count"], attempt["outcome"]) == ("escalated", 1, "escalated")
        said = "it has moved to https://elsewhere.example" if status < 400 else "no, never"
        assert row["last_error"] == f"agent coder: {URL} answered {status}: {said}"
        # It certainly did not happen: a person may mend the text and have the agent asked again.
        assert await effect_of(pool, row) == "failed"


@respx.mock
async def test_a_busy_agent_is_left_alone_for_as_long_as_it_says_and_nothing_is_charged(pool: Pool) -> None:
    for status, header, wait_s in ((408, {}, 60), (425, {"retry-after": "120"}, 120), (429, {"retry-after": "5"}, 5)):
        respx.post(URL).respond(status, headers=header)
        row, attempt = await asked(pool, HTTP)
        assert (row["status"], row["attempt_count"], attempt["outcome"]) == ("open", 0, "snoozed")
        wait = row["not_before"] - attempt["ended_at"]
        assert abs(wait - timedelta(seconds=wait_s)) < timedelta(seconds=1)


@respx.mock
async def test_a_5xx_is_tried_again_after_a_back_off(pool: Pool) -> None:
    for status in (500, 502, 503, 504):
        respx.post(URL).respond(status, text="oops")
        row, attempt = await asked(pool, HTTP)
        assert (row["status"], row["attempt_count"], attempt["outcome"]) == ("open", 1, "error")
        assert row["not_before"] > attempt["ended_at"]
        assert row["last_error"] == f"AgentFailed: {URL} answered {status}: oops"
        assert await effect_of(pool, row) == "intended"


@respx.mock
async def test_a_connection_that_fails_is_tried_again(pool: Pool) -> None:
    for error, told, state in (
        (httpx.ConnectError("refused"), f"NotDone: no connection to {URL}: refused", "failed"),
        (httpx.ConnectTimeout(""), f"NotDone: no connection to {URL}: ConnectTimeout", "failed"),
        (httpx.RemoteProtocolError("closed"), f"AgentFailed: the connection to {URL} broke: closed", "intended"),
    ):
        respx.post(URL).mock(side_effect=error)
        row, attempt = await asked(pool, HTTP)
        assert (row["status"], attempt["outcome"], row["last_error"]) == ("open", "error", told)
        assert await effect_of(pool, row) == state


@respx.mock
async def test_an_agent_that_takes_too_long_is_tried_again(pool: Pool) -> None:
    async def never(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(3600)
        return httpx.Response(200)

    respx.post(URL).mock(side_effect=never)
    row, attempt = await asked(pool, {**HTTP, "timeout_s": 0.05})
    assert (row["status"], row["attempt_count"], attempt["outcome"]) == ("open", 1, "error")
    assert row["last_error"] == f"AgentFailed: {URL} did not answer within 0.05 s"


@respx.mock
async def test_an_answer_that_is_not_json_is_tried_again(pool: Pool) -> None:
    for content in (b"", b"<html>", b"{", b"\xff", b"NaN", b"1e999", b"[" * 100_000):
        respx.post(URL).respond(200, content=content)
        row, attempt = await asked(pool, HTTP)
        assert (row["status"], attempt["outcome"], row["result"]) == ("open", "error", None)
        assert row["last_error"].startswith("AgentFailed: the answer is not JSON (")


@respx.mock
async def test_an_answer_without_end_is_not_read_to_its_end(pool: Pool) -> None:
    respx.post(URL).respond(200, content=b" " * (MAX_ANSWER_BYTES + 1))
    row, _ = await asked(pool, HTTP)
    assert row["last_error"] == f"AgentFailed: {URL} answered with more than {MAX_ANSWER_BYTES} bytes"


@respx.mock
async def test_a_result_with_what_postgres_refuses_is_kept_and_can_be_read_as_jsonb(pool: Pool) -> None:
    respx.post(URL).respond(200, content=b'{"a\\u0000b": ["\\ud83d", "\\ud83d\\ude0a", {"n": 12345678901234567890}]}')
    row, _ = await asked(pool, HTTP)
    assert row["status"] == "resolved"
    [read] = await sql(pool, "SELECT result::jsonb AS result FROM issues")
    assert read["result"] == {"a\ufffdb": ["\ufffd", "😊", {"n": 12345678901234567890}]}


@respx.mock
async def test_an_agent_that_resolved_it_is_not_asked_again_though_its_process_died_before_it_was_written(
    pool: Pool,
) -> None:
    route = respx.post(URL).respond(json="done")
    await enter(pool, {"coder": HTTP})
    id = await open_issue(pool)
    # The row refuses to be completed: what a crash between the two leaves behind.
    await sql(pool, "ALTER TABLE issues ADD CONSTRAINT not_yet CHECK (status <> 'resolved')")
    assert (await run(pool))["failed"] == 1
    await sql(pool, "ALTER TABLE issues DROP CONSTRAINT not_yet")
    await due(pool)
    assert (await run(pool))["resolved"] == 1
    assert len(route.calls) == 1
    assert await outcomes_of(pool, id) == ["error", "done"]


# Commands

ECHO = "import json, os, sys; json.dump([json.load(sys.stdin), os.environ['IDEMPOTENCY_KEY'], os.getcwd()], sys.stdout)"


def python(code: str, **settings: object) -> dict[str, object]:
    return {"type": "process", "command": [sys.executable, "-c", code], **settings}


async def test_a_command_reads_the_issue_and_prints_the_result(pool: Pool, tmp_path: Path) -> None:
    row, _ = await asked(pool, python(ECHO, cwd=str(tmp_path)), title="Umlaute äöü")
    told, key, directory = json.loads(row["result"])
    assert (row["status"], told["title"], told["attempt"]) == ("resolved", "Umlaute äöü", 1)
    assert key == told["idempotency_key"] == f"issues:{row['id']}:claimed:{row['visit']}:agent"
    assert directory == str(tmp_path)


async def test_a_command_that_fails_is_tried_again(pool: Pool) -> None:
    for adapter, complaint in (
        (python("raise SystemExit('it went wrong')"), "exited with code 1:\nit went wrong"),
        (python("print('no JSON')"), "AgentFailed: the answer is not JSON"),
        ({"type": "process", "command": ["/no/such/program"]}, "/no/such/program could not be started"),
        (python("print('1' * 2_000_000)"), f"wrote more than {MAX_ANSWER_BYTES} bytes"),
    ):
        row, attempt = await asked(pool, adapter)
        assert (row["status"], row["attempt_count"], attempt["outcome"]) == ("open", 1, "error")
        assert complaint in row["last_error"]


async def test_a_command_that_takes_too_long_is_killed_with_all_it_started(pool: Pool, tmp_path: Path) -> None:
    grandchild = f"import time; time.sleep(1); open({str(tmp_path / 'lived')!r}, 'w')"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {grandchild!r}]); time.sleep(60)"
    row, attempt = await asked(pool, python(code, timeout_s=0.5))
    assert (row["status"], attempt["outcome"]) == ("open", "error")
    assert "took longer than 0:00:00.5" in row["last_error"]
    await asyncio.sleep(1)
    assert not (tmp_path / "lived").exists()


# Text


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b'{"b": 1, "a": [true, null, 1.5]}', '{"b": 1, "a": [true, null, 1.5]}'),
        ("\ufeff1".encode(), None),
        (b"Infinity", None),
        (b"-1e400", None),
        (b"1 2", None),
        (b'"\\u0000\\udc00x"', '"\ufffd\ufffdx"'),
    ],
)
def test_json_is_taken_strictly_and_kept_as_postgres_can_store_it(raw: bytes, text: str | None) -> None:
    if text is None:
        with pytest.raises(ValueError, match=r".+"):
            json_text(raw)
    else:
        assert json_text(raw) == text


def test_text_without_anything_to_replace_stays_as_it_is() -> None:
    assert storable("a\tb\n😊") == "a\tb\n😊"
