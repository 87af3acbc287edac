"""What the README shows to copy works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gates

from webhooks import Consumer, Gate, Pool
from webhooks.delivery import Delivery
from webhooks.inbox import insert
from webhooks.worker import Worker

README = (Path(__file__).parent.parent / "README.md").read_text()
SCHEMA = (Path(__file__).parent.parent / "schema.sql").read_text()


def block(language: str, start: str) -> str:
    found = re.search(rf"```{language}\n({re.escape(start)}.*?)```", README, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_section_of_the_example_is_the_next_one() -> None:
    last = max(int(number) for number in re.findall(r"^-- section (\d+):", SCHEMA, re.MULTILINE))
    assert f"-- section {last + 1}: reviews" in README


async def test_the_handler_of_the_readme_reviews_a_pull_request_once(pool: Pool) -> None:
    await gates.sql(pool, block("sql", "-- section"))
    code = block("python", "# handlers/reviews.py")
    given = code.replace("from handlers.sources import github", "from webhooks import GitHub\n\ngithub = GitHub()")
    names: dict[str, Any] = {"__name__": "reviews"}
    exec(compile(given, "README.md", "exec"), names)  # noqa: S102
    reviews: Gate[Any] = names["reviews"]
    async with pool.transaction() as tx:
        assert await reviews.check(tx) == []
    worker = Worker(pool, Consumer(gates=[reviews], sources=[names["github"]]))
    worker.start()
    try:
        async with pool.transaction() as tx:
            event = (("x-github-event", "pull_request"),)
            body = b'{"action": "opened", "number": 7}'
            await insert(tx, [Delivery("github", key, event, body) for key in ("first", "second")])

        async def reviewed() -> bool:
            found = await gates.sql(pool, "SELECT review FROM reviews WHERE status = 'reviewed'")
            return [row["review"] for row in found] == ["#7 looks fine"]

        await gates.until(reviewed)
    finally:
        await worker.stop(0)
    assert [
        row["outcome"] for row in await gates.sql(pool, "SELECT outcome FROM attempts WHERE table_name = 'reviews'")
    ] == ["done"]
