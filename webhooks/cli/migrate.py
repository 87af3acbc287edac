"""`webhooks migrate`."""

from __future__ import annotations

import click

from webhooks.cli.app import examples, run
from webhooks.migrate import migrate as apply_sections
from webhooks.migrate import schema_sql, sections
from webhooks.serve.database import connected
from webhooks.settings import Settings


@click.command(epilog=examples("DATABASE_URL=postgresql://… webhooks migrate"))
def migrate() -> None:
    """Bring the database to the current schema."""
    settings = Settings.load()
    applied = run(_migrate(settings))
    titles = {section.number: section.title for section in sections(schema_sql())}
    for number in applied:
        click.echo(f"applied section {number}: {titles[number]}")
    if not applied:
        click.echo("nothing to do")


async def _migrate(settings: Settings) -> list[int]:
    async with connected(settings, make=True) as connection:
        return await apply_sections(connection, schema=settings.schema_name)
