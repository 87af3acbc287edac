"""The shapes of what comes in: the session's row, and the parts of events and answers that the flow reads."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Id: TypeAlias = Annotated[int, Field(strict=True, gt=0, lt=2**63)]
"""A number that names something: whole, above zero, and one that a bigint holds. `true` is none, nor is "5"."""

FullName = Annotated[str, StringConstraints(pattern=r"^[\w.-]+/[\w.-]+$", max_length=300)]
"""A repository's `owner/name`."""


class PatchSession(BaseModel):
    """A row of `patch_sessions`: the columns that phases read."""

    sc_id: int
    title: str
    story_url: str | None = None
    question: str | None = None
    answer: str | None = None
    patch: str | None = None
    base_commit: str | None = None
    opened_at: datetime

    @property
    def branch(self) -> str:
        return f"patch/sc-{self.sc_id}"


# ---- what Shortcut's events say


class Reference(BaseModel):
    id: Id | str | None = None
    entity_type: str | None = None
    name: str | None = None


class ListChange(BaseModel):
    adds: list[Id | str] = []


class StoryChanges(BaseModel):
    label_ids: ListChange = ListChange()


class StoryEvent(BaseModel):
    """`story.create` has `label_ids`, `story.update` has `changes`."""

    id: Id
    name: str | None = None
    app_url: str | None = None
    label_ids: list[Id | str] = []
    changes: StoryChanges = StoryChanges()
    references: list[Reference] = []

    @property
    def labels_added(self) -> set[str]:
        """The names of the labels that this event put on the story."""
        return {name for id in self._added if (name := self._names.get(id)) is not None}

    @property
    def labels_unnamed(self) -> set[int | str]:
        """The numbers of the labels that this event put on the story, and whose names the body does not say."""
        return self._added - self._names.keys()

    @property
    def _added(self) -> set[int | str]:
        return {*self.label_ids, *self.changes.label_ids.adds}

    @property
    def _names(self) -> dict[int | str | None, str]:
        return {label.id: label.name for label in self.references if label.entity_type == "label" and label.name}


class CommentEvent(BaseModel):
    """`story-comment.create`."""

    id: Id
    story_id: Id | None = None
    text: str | None = None
    author_id: str | None = None


# ---- what GitHub's events say


class GitHubRepository(BaseModel):
    """Its number stays; its name changes when it is renamed or given to somebody else, and may then be another's."""

    id: Id
    full_name: FullName


class Branch(BaseModel):
    ref: str
    repo: GitHubRepository | None = None
    """None when the fork that it was in is gone."""


class ClosedPullRequest(BaseModel):
    number: Id
    html_url: str
    head: Branch
    base: Branch
    merged: bool = False
    merged_at: datetime | None = None


class PullRequestEvent(BaseModel):
    pull_request: ClosedPullRequest


# ---- what the two APIs answer


class StoryComment(BaseModel):
    model_config = ConfigDict(extra="allow")

    id: int
    text: str | None = None
    author_id: str | None = None
    external_id: str | None = None
    created_at: datetime


class Story(BaseModel):
    """A story as Shortcut has it; the fields not named here are kept for the clarifier and the drafter."""

    model_config = ConfigDict(extra="allow")

    id: int
    name: str
    description: str = ""
    app_url: str | None = None
    workflow_id: int | None = None
    workflow_state_id: int | None = None
    comments: list[StoryComment] = []


class WorkflowState(BaseModel):
    id: int
    name: str
    type: str


class Workflow(BaseModel):
    id: int
    states: list[WorkflowState]


class Head(BaseModel):
    ref: str
    sha: str


class PullRequest(BaseModel):
    number: int
    html_url: str
    state: str
    head: Head
    base: Branch | None = None
    """None in what was recorded before it was read."""

    @property
    def repository_id(self) -> int | None:
        return self.base.repo.id if self.base is not None and self.base.repo is not None else None


# ---- what the configured commands answer


class Questions(BaseModel):
    questions: list[str] = []


class Draft(BaseModel):
    diff: str
    base_commit: str
    """The commit that the diff applies to."""
