"""What an agent resolved, told on the GitHub issue it came from, once.

Source: docs.github.com/rest/issues/comments. Each comment carries its effect's idempotency key, hidden in an HTML
comment, and is looked for before it is posted: so a repetition is harmless.
"""

from __future__ import annotations

import json
import re
from typing import cast

from pydantic import BaseModel, TypeAdapter

from handlers.calls import call
from handlers.github_api import github_http

LONGEST_TEXT = 60_000
"""GitHub takes 65,536 characters, our mark included."""
PAGE = 100
SPOKEN = ("comment", "summary", "text")
"""Where a result may say in words what is to be commented."""


class IssueComment(BaseModel):
    id: int
    html_url: str
    body: str | None = None


_COMMENTS = TypeAdapter(list[IssueComment])


def reference(number: int) -> str:
    """What `issues.external_ref` holds for an issue of the repository that is its company."""
    return f"github#{number}"


def number_of(external_ref: str | None) -> int | None:
    """The issue's number on GitHub; None for one from elsewhere."""
    found = re.fullmatch(r"github#([1-9][0-9]{0,18})", external_ref or "")
    return None if found is None else int(found[1])


class Comments:
    """Comments on the issues of a repository.

    Args:
        repository: what it is called now. No argument of the effect, because that may change between two attempts.
    """

    def __init__(self, repository: str) -> None:
        self._issues = f"/repos/{repository}/issues"

    async def once(self, _company_id: str, number: int, text: str, mark: str) -> IssueComment:
        """Comment on the issue, unless the comment with this mark is there already.

        Raises:
            Escalate: there is no token.
        """
        hidden = f"<!-- {mark} -->"
        path = f"{self._issues}/{number}/comments"
        async with github_http("the agent's result is commented on GitHub with it", "webhooks-issues") as http:
            page = 1
            while True:
                params = {"per_page": PAGE, "page": page}
                found = _COMMENTS.validate_python(await call(http, "GET", path, params=params))
                for comment in found:
                    if hidden in (comment.body or ""):
                        return comment
                if len(found) < PAGE:
                    break
                page += 1
            body = {"body": f"{text}\n\n{hidden}"}
            return IssueComment.model_validate(await call(http, "POST", path, json=body))


def comment_of(result: str) -> str:
    """What is said about a result: its own words where it has some (`SPOKEN`), else the JSON itself."""
    value = json.loads(result)
    said = _words(value)
    if said is not None:
        return said[:LONGEST_TEXT]
    return f"```json\n{json.dumps(value, ensure_ascii=False, indent=2)[:LONGEST_TEXT]}\n```"


def _words(value: object) -> str | None:
    if isinstance(value, str):
        return value.strip() or None
    if isinstance(value, dict):
        result = cast("dict[str, object]", value)
        for name in SPOKEN:
            if isinstance(said := result.get(name), str) and said.strip():
                return said.strip()
    return None
