"""The stand-in's comments on GitHub issues, of whatever repository: nothing is known of an issue but what was said."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, TypeAdapter
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from handlers.standin.state import IssueComment, State

_PER_PAGE: TypeAdapter[int] = TypeAdapter(Annotated[int, Field(ge=1, le=100)])
_PAGE: TypeAdapter[int] = TypeAdapter(Annotated[int, Field(ge=1)])


class NewComment(BaseModel):
    body: str


class IssueCommentsStandin:
    def __init__(self, state: State, url: str) -> None:
        self.state = state
        self.url = url

    def routes(self) -> list[Route]:
        path = "/repos/{owner}/{repository}/issues/{number:int}/comments"
        return [
            Route(path, self.list_comments, methods=["GET"]),
            Route(path, self.create_comment, methods=["POST"]),
        ]

    async def list_comments(self, request: Request) -> JSONResponse:
        size = _PER_PAGE.validate_python(request.query_params.get("per_page", 30))
        page = _PAGE.validate_python(request.query_params.get("page", 1))
        found = self.state.issue_comments.get(_issue(request), [])[(page - 1) * size : page * size]
        return JSONResponse([comment.model_dump(mode="json") for comment in found])

    async def create_comment(self, request: Request) -> JSONResponse:
        new, issue = NewComment.model_validate_json(await request.body()), _issue(request)
        id = self.state.next_id()
        comment = IssueComment(id=id, body=new.body, html_url=f"{self.url}/{issue}#issuecomment-{id}")
        self.state.issue_comments.setdefault(issue, []).append(comment)
        self.state.save()
        return JSONResponse(comment.model_dump(mode="json"), 201)


def _issue(request: Request) -> str:
    return "{owner}/{repository}/issues/{number}".format_map(request.path_params)
