"""A rolling deploy: two versions of an application on one database, each with what the other does not know."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import psycopg
from consumers import Request, digest, from_github, from_shortcut, stories
from processes import SECRETS, eventually, serving, started, webhooks
from versions import APPLIED

EACH = 50


async def sent(url: str, requests: list[Request]) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        ten = asyncio.Semaphore(10)

        async def send(request: Request) -> int:
            async with ten:
                answer = await client.post(request.path, headers=request.headers, content=request.body)
            return answer.status_code

        assert set(await asyncio.gather(*map(send, requests))) == {202}


def github(event: str) -> list[Request]:
    signature = f"sha256={digest(b'{}', SECRETS['WEBHOOKS_SECRET_GITHUB'])}"
    return [from_github(b"{}", event=event, signature=signature) for _ in range(EACH)]


def shortcut() -> list[Request]:
    bodies = [stories(key) for key in range(EACH)]
    return [from_shortcut(body, signature=digest(body, SECRETS["WEBHOOKS_SECRET_SHORTCUT"])) for body in bodies]


def test_a_rolling_deploy_ignores_nothing_and_applies_nothing_twice(tmp_path: Path, database_url: str) -> None:
    """Both directions: the old version's workers get what only the new one handles, and the new one's the other way."""
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(APPLIED)
        with (
            serving(tmp_path / "old", database_url, "--app", "versions:old") as old,
            serving(tmp_path / "new", database_url, "--app", "versions:new") as new,
        ):

            async def deploy() -> None:
                await asyncio.gather(
                    sent(new.receiver, github("release") + shortcut() + github("push")),
                    sent(old.receiver, github("fork")),
                )

            asyncio.run(deploy())
            eventually(lambda: not statuses(connection) & {"received", "applying"}, within_s=60)
            assert statuses(connection) == {"processed"}
            found = connection.execute("SELECT event, pid, count(*) FROM applied GROUP BY 1, 2").fetchall()
            # Some met the version that does not know them, or this shows nothing.
            left = connection.execute(
                "SELECT DISTINCT d.event FROM attempts AS a JOIN deliveries AS d ON d.id::text = a.key"
                " WHERE a.outcome = 'snoozed'"
            ).fetchall()
            twice = connection.execute("SELECT delivery FROM applied GROUP BY 1 HAVING count(*) > 1").fetchall()
    assert twice == []
    assert sum(count for *_, count in found) == 4 * EACH
    by = {event: {pid for name, pid, _ in found if name == event} for event, *_ in found}
    assert (by["release"], by["story.update"], by["fork"]) == ({new.pid}, {new.pid}, {old.pid})
    assert left


def test_a_receiver_registers_before_it_listens_and_says_when_it_has_ended(tmp_path: Path, database_url: str) -> None:
    arguments = ("serve", "--no-worker", "--app", "versions:new", "--port", "0", "--control-port", "0")
    with psycopg.connect(database_url) as connection:
        connection.execute("LOCK TABLE processes IN SHARE MODE")
        with started(tmp_path, *arguments, DATABASE_URL=database_url, **SECRETS) as process:
            process.says("this process cannot register yet")
            assert "receiver  http://" not in process.output
            connection.rollback()
            process.says("receiver  http://")
            shown = "SELECT app, handles, accepts, flows, stopped_at IS NULL FROM processes"
            handles = ["github/push", "github/release", "shortcut/story.update"]
            line = ("versions:new", handles, ["github", "shortcut"], {})
            assert connection.execute(shown).fetchall() == [(*line, True)]
            connection.rollback()
            status = webhooks(tmp_path, "status", "--app", "versions:new", DATABASE_URL=database_url).stdout
            assert f":{process.pid}:" in status
            assert "versions:new" in status
            process.signal()
            assert process.ends() == 0
        assert connection.execute(shown).fetchall() == [(*line, False)]


def statuses(connection: psycopg.Connection) -> set[str]:
    return {status for (status,) in connection.execute("SELECT DISTINCT status FROM deliveries")}
