"""The whole flow, as `serve --dev` runs it: receiver, worker and stand-in, from the label to the finished story."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from patch_flow import labelled, rows, session

from handlers import consumer
from handlers.settings import settings
from handlers.standin import standin
from handlers.standin.deliveries import sign
from handlers.standin.server import listen, served
from webhooks import Pool
from webhooks.accept import Accepter
from webhooks.receiver import Receiver
from webhooks.worker import Worker

SECRETS = {"shortcut": ("secret of shortcut",), "github": ("secret of github",)}


@pytest.fixture
async def pool(database_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pool]:
    """A running consumer: its receiver on a socket, a worker, and the stand-in whose people act at once."""
    sock = listen(0)
    monkeypatch.setenv("WEBHOOKS_RECEIVER_URL", f"http://127.0.0.1:{sock.getsockname()[1]}")
    for source, (secret,) in SECRETS.items():
        monkeypatch.setenv(f"WEBHOOKS_SECRET_{source.upper()}", secret)
    async with Pool.open(database_url) as pool:
        worker = Worker(pool, consumer)
        accepter = Accepter(pool, consumer, worker.know)
        await accepter.start()
        worker.start()
        try:
            async with served(Receiver(consumer.sources, SECRETS, accepter, max_body_bytes=1_000_000), sock):
                yield pool
        finally:
            await worker.stop(5)
            await accepter.stop()


async def reached(pool: Pool, status: str, sc_id: int = 5) -> dict[str, Any]:
    """The session once it has this status; polled, because it passes through many hands."""
    for _ in range(600):
        found = await rows(pool, "SELECT 1 FROM patch_sessions WHERE sc_id = %(sc_id)s", sc_id=sc_id)
        row = await session(pool, sc_id) if found else {"status": None, "last_error": None}
        if row["status"] == status:
            return row
        assert row["status"] != "escalated", row["last_error"]
        await asyncio.sleep(0.05)
    raise AssertionError(f"still {row['status']}: {row['last_error']}")


async def test_a_label_becomes_a_merged_pull_request_each_phase_once_though_it_was_sent_fifty_times(
    pool: Pool, tmp_path: Path
) -> None:
    async with standin(directory=tmp_path, port=0, delay=timedelta(0)), httpx.AsyncClient() as http:
        delivery = labelled()
        headers = {"payload-signature": sign("shortcut", delivery.body) or ""}
        url = f"{os.environ['WEBHOOKS_RECEIVER_URL']}/webhooks/shortcut"
        answers = await asyncio.gather(*(http.post(url, content=delivery.body, headers=headers) for _ in range(50)))
        assert sorted(answer.status_code for answer in answers)[-1] == 202
        finished = await reached(pool, "finished")
        story = (await http.get(f"{settings().shortcut_api}/stories/5")).json()
    assert (finished["title"], finished["pull_request_number"], finished["attempt_count"]) == (
        "Retry failed exports",
        1,
        1,
    )
    assert "notes/sc-5.md" in finished["patch"]
    assert finished["merged_at"] is not None
    assert story["workflow_state_id"] == 3
    ran = await rows(
        pool, "SELECT phase, outcome FROM attempts WHERE table_name = 'patch_sessions' ORDER BY claimed_at"
    )
    assert [(row["phase"], row["outcome"]) for row in ran] == [
        (phase, "done") for phase in ("clarifying", "drafting", "opening", "finishing")
    ]


async def test_a_question_is_answered_on_the_story_and_the_answer_is_drafted_from(pool: Pool, tmp_path: Path) -> None:
    async with standin(directory=tmp_path, port=0, delay=timedelta(0)), httpx.AsyncClient() as http:
        new = {"name": "Which colour?", "labels": [{"name": "patch"}]}
        made = (await http.post(f"{settings().shortcut_api}/stories", json=new)).json()
        finished = await reached(pool, "finished", made["id"])
    assert finished["question"] == "What should “Which colour?” come to?"
    assert finished["answer"] == "Something small that is easy to review."
    assert "+Answered: Something small that is easy to review." in finished["patch"]
    dead = await rows(pool, "SELECT event, reason FROM deliveries WHERE status = 'dead'")
    assert dead == []
