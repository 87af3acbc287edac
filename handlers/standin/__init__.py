"""A small local stand-in for Shortcut, GitHub and agents, so that the flows can be watched without any of them.

It answers the calls that the flow makes, and behaves like the providers: whatever is written to it comes back as a
signed webhook, and its people act by themselves after two seconds: one answers what the bot asks, one merges what
the bot proposes. Its repository and its memory are under `.webhooks/standin/`.

A story it has never heard of is made up on first reading (so a triggered sample runs); one of its own is made with::

    curl -d '{"name": "Which colour?", "labels": [{"name": "patch"}]}' http://127.0.0.1:3200/shortcut/stories
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from pathlib import Path

import click
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount

from handlers.heartbeat_run import stop_runs
from handlers.settings import settings
from handlers.standin import clarifier, drafter
from handlers.standin.agent import AgentStandin
from handlers.standin.errands import Errands
from handlers.standin.github import GitHubStandin
from handlers.standin.issue_comments import IssueCommentsStandin
from handlers.standin.repository import MAIN, Repository
from handlers.standin.server import listen, served
from handlers.standin.shortcut import ShortcutStandin
from handlers.standin.state import BOT_ID, State

REPOSITORY_NAME = "Codertocat/Hello-World"
"""That of GitHub's own sample payloads, so that a triggered sample is about this one."""


@asynccontextmanager
async def standin(
    *,
    directory: Path | None = None,
    port: int = 3200,
    delay: timedelta = timedelta(seconds=2),
) -> AsyncGenerator[None]:
    """Serve the stand-in, with the flow's settings pointing at it where they are not set already.

    Args:
        directory: where it keeps its repository and its memory; `standin` in `WEBHOOKS_HOME` by default.
        port: where it listens on 127.0.0.1; any other port where this one is taken.
        delay: how long its people take to act.

    Raises:
        click.ClickException: the program git is not installed.
    """
    if shutil.which("git") is None:
        raise click.ClickException("the stand-in and the patch flow need the program git: install it and start again")
    home = made(directory or Path(os.environ.get("WEBHOOKS_HOME") or ".webhooks") / "standin")
    repository = Repository(home / "repository.git")
    await repository.prepare()
    sock = listen(port)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    with defaults(flow_settings(url, repository)):
        async with Errands() as errands:
            state = State.load(home / "state.json")
            shortcut = ShortcutStandin(state, errands, f"{url}/shortcut", delay)
            name = settings().github_repository or REPOSITORY_NAME
            github = GitHubStandin(name, state, errands, repository, f"{url}/github", delay)
            comments = IssueCommentsStandin(state, f"{url}/github")
            agents = AgentStandin()
            async with served(application(shortcut, github, comments, agents), sock):
                (home / "url").write_text(f"{url}\n")  # where `webhooks demo issues` finds the agents
                click.echo(f"stand-in for Shortcut, GitHub and agents: {url}/shortcut, /github and /agents", err=True)
                try:
                    yield
                finally:
                    await stop_runs()  # or they would take it for a failure that their agents are gone
                    await agents.close()


def made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory.resolve()


def application(
    shortcut: ShortcutStandin, github: GitHubStandin, comments: IssueCommentsStandin, agents: AgentStandin
) -> Starlette:
    return Starlette(
        routes=[
            Mount("/shortcut", routes=shortcut.routes()),
            Mount("/github", routes=[*github.routes(), *comments.routes()]),
            Mount("/agents", routes=agents.routes()),
        ],
        exception_handlers={HTTPException: _refuse, ValidationError: _refuse},
    )


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    """Both providers explain themselves in `message`."""
    if isinstance(error, HTTPException):
        return JSONResponse({"message": error.detail}, error.status_code)
    return JSONResponse({"message": str(error)}, 400)


def flow_settings(url: str, repository: Repository) -> dict[str, str]:
    """The settings under which the patch flow runs against the stand-in."""
    return {
        "SHORTCUT_API": f"{url}/shortcut",
        "GITHUB_API": f"{url}/github",
        "WEBHOOKS_SHORTCUT_TOKEN": "stand-in",
        "WEBHOOKS_SHORTCUT_BOT": BOT_ID,
        "WEBHOOKS_GITHUB_TOKEN": "stand-in",
        "PATCH_GITHUB_REPOSITORY": REPOSITORY_NAME,
        "PATCH_REPOSITORY": str(repository.path),
        "PATCH_BASE_BRANCH": MAIN,
        "PATCH_CLARIFIER": shlex.join([sys.executable, str(clarifier.__file__)]),
        "PATCH_DRAFTER": shlex.join([sys.executable, str(drafter.__file__)]),
    }


@contextmanager
def defaults(variables: Mapping[str, str]) -> Generator[None]:
    """Set those of `variables` that are not set, as long as the block runs."""
    ours = {name: value for name, value in variables.items() if not os.environ.get(name)}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
