"""The stand-in's GitHub: the part of its REST API that the flow uses, a reviewer, and the webhooks these cause."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import structlog
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from handlers.runner import CommandFailed
from handlers.standin.deliveries import send_github
from handlers.standin.errands import Errands
from handlers.standin.repository import Repository
from handlers.standin.state import Pull, State, now

log = structlog.get_logger(__name__)

AT_ONCE = timedelta(0)
REPOSITORY_ID = 3200


class NewPull(BaseModel):
    title: str
    head: str
    base: str
    body: str = ""


class PullUpdate(BaseModel):
    state: str


class GitHubStandin:
    """One repository, `name` (owner/name)."""

    def __init__(
        self, name: str, state: State, errands: Errands, repository: Repository, url: str, delay: timedelta
    ) -> None:
        self.name = name
        self.owner = name.split("/")[0]
        self.state = state
        self.errands = errands
        self.repository = repository
        self.url = url
        self.delay = delay
        for pull in state.pulls.values():
            if pull.state == "open":
                self.errands.after(delay, partial(self._review, pull))

    def routes(self) -> list[Route]:
        pulls = f"/repos/{self.name}/pulls"
        return [
            Route(pulls, self.list_pulls, methods=["GET"]),
            Route(pulls, self.create_pull, methods=["POST"]),
            Route(pulls + "/{number:int}", self.read_pull, methods=["GET"]),
            Route(pulls + "/{number:int}", self.update_pull, methods=["PATCH"]),
            Route(pulls + "/{number:int}/merge", self.merge_pull, methods=["PUT"]),
            Route(f"/{self.name}/pull/{{number:int}}", self.show_pull, methods=["GET"]),
        ]

    # ---- what is asked

    async def list_pulls(self, request: Request) -> JSONResponse:
        head, state = request.query_params.get("head"), request.query_params.get("state", "open")
        fitting = [
            self._pull(pull)
            for pull in reversed(self.state.pulls.values())
            if head in (None, f"{self.owner}:{pull.branch}") and state in ("all", pull.state)
        ]
        return JSONResponse(fitting)

    async def create_pull(self, request: Request) -> JSONResponse:
        new = NewPull.model_validate_json(await request.body())
        sha = await self.repository.commit_of(new.head)
        if sha is None:
            raise HTTPException(422, f"Validation Failed: there is no branch {new.head}")
        if any(pull.branch == new.head and pull.state == "open" for pull in self.state.pulls.values()):
            raise HTTPException(422, f"Validation Failed: a pull request already exists for {new.head}")
        number = len(self.state.pulls) + 1
        pull = Pull(number=number, title=new.title, body=new.body, branch=new.head, sha=sha, base=new.base)
        self.state.pulls[number] = pull
        self.state.save()
        self._send("opened", pull)
        self.errands.after(self.delay, partial(self._review, pull))
        return JSONResponse(self._pull(pull), 201)

    async def read_pull(self, request: Request) -> JSONResponse:
        return JSONResponse(self._pull(self._found(request)))

    async def update_pull(self, request: Request) -> JSONResponse:
        pull, update = self._found(request), PullUpdate.model_validate_json(await request.body())
        if update.state == "closed" and pull.state == "open":
            self._close(pull)
        return JSONResponse(self._pull(pull))

    async def merge_pull(self, request: Request) -> JSONResponse:
        pull = self._found(request)
        if pull.state != "open":
            raise HTTPException(405, "Pull Request is not mergeable")
        try:
            await self._merge(pull)
        except CommandFailed as error:
            raise HTTPException(405, "Pull Request is not mergeable") from error
        return JSONResponse(
            {"sha": pull.merge_commit_sha, "merged": True, "message": "Pull Request successfully merged"}
        )

    async def show_pull(self, request: Request) -> PlainTextResponse:
        """What a person sees who follows the link."""
        pull = self._found(request)
        patch = await self.repository.show(pull.sha)
        state = "merged" if pull.merged_at else pull.state
        return PlainTextResponse(f"#{pull.number} {pull.title} ({state})\n\n{pull.body}\n{patch}\n")

    # ---- what happens then

    def _found(self, request: Request) -> Pull:
        pull = self.state.pulls.get(request.path_params["number"])
        if pull is None:
            raise HTTPException(404, "Not Found")
        return pull

    async def _review(self, pull: Pull) -> None:
        """A person looks after a while, likes it, and merges it."""
        if pull.state != "open":
            return
        try:
            await self._merge(pull)
        except CommandFailed as error:
            log.warning("the stand-in's reviewer closed a pull request", number=pull.number, error=str(error))
            self._close(pull)

    async def _merge(self, pull: Pull) -> None:
        pull.merge_commit_sha = await self.repository.merge(pull.branch, pull.title)
        pull.merged_at = now()
        self._close(pull)

    def _close(self, pull: Pull) -> None:
        pull.state = "closed"
        pull.closed_at = pull.merged_at or now()
        self.state.save()
        self._send("closed", pull)

    def _send(self, action: str, pull: Pull) -> None:
        owner = {"login": self.owner, "type": "User"}
        body = {
            "action": action,
            "number": pull.number,
            "pull_request": self._pull(pull),
            "repository": {
                "id": REPOSITORY_ID,
                "full_name": self.name,
                "name": self.name.split("/")[1],
                "owner": owner,
            },
            "sender": owner,
        }
        self.errands.after(AT_ONCE, partial(send_github, "pull_request", body))

    def _pull(self, pull: Pull) -> dict[str, Any]:
        repository = {"id": REPOSITORY_ID, "full_name": self.name}
        shown = pull.model_dump(mode="json", exclude={"branch", "sha", "base"})
        return {
            **shown,
            "url": f"{self.url}/repos/{self.name}/pulls/{pull.number}",
            "html_url": f"{self.url}/{self.name}/pull/{pull.number}",
            "updated_at": (pull.closed_at or pull.created_at).isoformat(),
            "merged": pull.merged_at is not None,
            "head": {"ref": pull.branch, "sha": pull.sha, "repo": repository},
            "base": {"ref": pull.base, "repo": repository},
        }
