"""`docs/claims.md` keeps its word: its statements run as they stand there, and so do its commands."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from heartbeats import sql
from processes import environment, serving

from handlers.agents import read_agents
from webhooks import Pool

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
TRY_IT = PAGE[PAGE.index("## Try it") :]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


async def test_every_statement_runs(pool: Pool) -> None:
    for block in blocks(PAGE, "sql"):
        for statement in re.sub(r"--.*", "", block).split(";"):
            if statement.strip() not in ("", "BEGIN", "COMMIT"):
                await sql(pool, statement.strip())
    agents, problems = read_agents(await sql(pool, "SELECT * FROM agents"))
    assert (len(agents), problems) == (2, [])


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page asks with curl")
def test_the_try_out_does_what_it_says(database_url: str, tmp_path: Path) -> None:
    variables = {"WEBHOOKS_APP": "handlers:consumer", "DATABASE_URL": database_url}
    with serving(tmp_path, database_url, "--dev", **variables) as server:
        server.says("stand-in for Shortcut, GitHub and agents")
        standin = (tmp_path / ".webhooks" / "standin" / "url").read_text().strip()

        here = {
            ".venv/bin/webhooks": f"{sys.executable} -m webhooks",
            ".venv/bin/python": sys.executable,
            "localhost:3100": server.control.removeprefix("http://"),
            "localhost:3200": standin.removeprefix("http://"),
        }

        def run(commands: str) -> str:
            """Run what the page says, where this server is."""
            commands = re.sub("|".join(map(re.escape, here)), lambda printed: here[printed[0]], commands)
            done = subprocess.run(
                ["/bin/sh", "-e", "-c", commands],
                cwd=tmp_path,
                env=environment(**variables),
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            return done.stdout

        demo, heartbeats, query, flaky = blocks(TRY_IT, "console")
        assert "3 agents" in run(demo)
        runs = [json.loads(line) for line in re.findall(r"\{.*?\}", run(heartbeats))]
        assert len(runs) == 3
        assert sum(one["resolved"] for one in runs) == 30
        assert [line for line in run(query).splitlines() if line.startswith(("[", "{"))] == [
            "[{'attempt_count': 1, 'count': 30}]",
            '{"calls":30,"accepted":30}',
        ]
        assert re.search(r"^total +30 ", run(flaky), re.MULTILINE)
