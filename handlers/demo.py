"""`webhooks demo`: something to try things on."""

from __future__ import annotations

import os
from pathlib import Path

import click
from psycopg.types.json import Jsonb
from pydantic import HttpUrl, TypeAdapter, ValidationError

from handlers.commands import run
from handlers.issues import PRIORITIES, issues
from webhooks import Pool, Transaction

STANDIN = "http://127.0.0.1:3200"
"""Where the stand-in is unless that port was taken; where it really is stands in a file of its own."""
TITLES = (
    "The export stops at 1,000 rows",
    "Dates are shown in the wrong time zone",
    "A link in the welcome mail is broken",
    "Searching for an umlaut finds nothing",
    "The settings page forgets its filter",
    "Totals differ by a cent after rounding",
    "Uploading an empty file shows a stack trace",
    "The log fills up with one warning",
)

COMPANY = "INSERT INTO companies (id, name) VALUES (%(company)s, %(company)s) ON CONFLICT (id) DO NOTHING"
AGENT = """
INSERT INTO agents (company_id, id, name, adapter) VALUES (%(company)s, %(id)s, %(name)s, %(adapter)s)
ON CONFLICT (company_id, id) DO UPDATE SET adapter = excluded.adapter
"""


@click.group()
def demo() -> None:
    """Make something to try things on."""


@demo.command("issues", epilog="\b\nExample:\n  webhooks demo issues --company acme --agents 3 --issues 30")
@click.option("--company", default="acme", show_default=True, help="The company's id; it is made if need be.")
@click.option("--agents", type=click.IntRange(1, 100), default=3, show_default=True, help="How many agents it has.")
@click.option("--issues", "count", type=click.IntRange(1, 100_000), default=30, show_default=True, help="How many.")
@click.option("--failing", type=click.IntRange(0, 100), default=0, show_default=True, help="Failing calls, in percent.")
@click.option("--url", help="The agents' own, instead of the stand-in that webhooks serve --dev runs.")
def demo_issues(company: str, agents: int, count: int, failing: int, url: str | None) -> None:
    """Make a company with agents and open issues; called again, it opens more.

    The agents are a stand-in, part of webhooks serve --dev, that calls every issue resolved.
    """
    base = url or standin_url()
    try:
        TypeAdapter(HttpUrl).validate_python(base)
    except ValidationError as error:
        raise click.BadParameter(error.errors()[0]["msg"], param_hint="--url") from None
    run(_make(company, agents, count, failing, base.rstrip("/")))
    click.echo(f"company {company}: {agents} agents at {base}, {count} more open issues")
    click.echo(f"try it: webhooks heartbeat {company}")


def standin_url() -> str:
    """Where the stand-in's agents are: at the address that it wrote down when it started."""
    written = Path(os.environ.get("WEBHOOKS_HOME") or ".webhooks") / "standin" / "url"
    return (written.read_text().strip() if written.exists() else STANDIN) + "/agents"


async def _make(company: str, agents: int, count: int, failing: int, url: str) -> None:
    async with Pool.open() as pool, pool.transaction() as tx:
        await tx.execute(COMPANY, {"company": company})
        names = [f"agent-{number}" for number in range(1, agents + 1)]
        for name in names:
            adapter = {"type": "http", "url": f"{url}/{name}" + (f"?failing={failing}" if failing else "")}
            await tx.execute(AGENT, {"company": company, "id": name, "name": name, "adapter": Jsonb(adapter)})
        await _open(tx, company, names, count)


async def _open(tx: Transaction, company: str, agents: list[str], count: int) -> None:
    for number in range(count):
        await issues.open(
            tx,
            company_id=company,
            assigned_agent_id=agents[number % len(agents)],
            title=TITLES[number % len(TITLES)],
            priority=PRIORITIES[number // len(agents) % len(PRIORITIES)],
        )
