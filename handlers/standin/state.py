"""What the stand-in remembers from one run to the next, in one JSON file."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, Field, PrivateAttr

WORKFLOW_ID = 1
STATES = {1: ("Unscheduled", "unstarted"), 2: ("In Development", "started"), 3: ("Completed", "done")}
PERSON_ID = "00000000-0000-4000-8000-000000000001"
BOT_ID = "00000000-0000-4000-8000-000000000002"


def now() -> datetime:
    return datetime.now(UTC)


class Comment(BaseModel):
    id: int
    text: str
    author_id: str
    external_id: str | None = None
    created_at: datetime = Field(default_factory=now)


class Label(BaseModel):
    id: int
    name: str


class Story(BaseModel):
    id: int
    name: str
    description: str = ""
    story_type: str = "feature"
    workflow_id: int = WORKFLOW_ID
    workflow_state_id: int = 1
    labels: list[Label] = []
    comments: list[Comment] = []


class Pull(BaseModel):
    number: int
    title: str
    body: str
    branch: str
    sha: str
    base: str
    state: str = "open"
    created_at: datetime = Field(default_factory=now)
    closed_at: datetime | None = None
    merged_at: datetime | None = None
    merge_commit_sha: str | None = None


class IssueComment(BaseModel):
    id: int
    body: str
    html_url: str


class State(BaseModel):
    stories: dict[int, Story] = {}
    pulls: dict[int, Pull] = {}
    issue_comments: dict[str, list[IssueComment]] = {}
    labels: dict[str, int] = {}
    last_id: int = 100
    _file: Path | None = PrivateAttr(None)

    @classmethod
    def load(cls, file: Path) -> State:
        state = cls.model_validate_json(file.read_bytes()) if file.exists() else cls()
        state._file = file
        return state

    def save(self) -> None:
        if self._file is not None:
            half = self._file.with_suffix(".new")
            half.write_text(self.model_dump_json(indent=2))
            half.replace(self._file)

    def next_id(self) -> int:
        self.last_id += 1
        return self.last_id

    def label(self, name: str) -> Label:
        """The label of this name; a new one gets a new id."""
        if name not in self.labels:
            self.labels[name] = self.next_id()
        return Label(id=self.labels[name], name=name)
