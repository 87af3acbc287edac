"""What the patch flow is told through the environment.

Read anew by every use (`settings()`), never kept: so a test, or the stand-in under ``serve --dev``, sets a
variable and the next call sees it. Nothing of this goes into the arguments of an effect, because those must
be the same on every attempt, and a person may mend a setting between two of them.
"""

from __future__ import annotations

import shlex
from typing import Annotated, TypeVar

from pydantic import Field, SecretStr, StringConstraints, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from webhooks import Escalate

T = TypeVar("T")
RepositoryName = Annotated[str, StringConstraints(pattern=r"^[\w.-]+/[\w.-]+$")]


class Settings(BaseSettings):
    """The settings of the patch flow; an empty variable counts as one that is not set."""

    model_config = SettingsConfigDict(env_prefix="PATCH_", env_ignore_empty=True, frozen=True, extra="ignore")

    label: str = "patch"
    """``PATCH_LABEL``: the label that opens a session."""
    clarifier: str | None = None
    """``PATCH_CLARIFIER``: reads the story (JSON), prints ``{"questions": [...]}`` or ``{}``. Not set: never asks."""
    drafter: str | None = None
    """``PATCH_DRAFTER``: reads the story (JSON), runs in a checkout, prints a unified diff."""
    repository: str | None = None
    """``PATCH_REPOSITORY``: what git fetches from and pushes to. Not set: the GitHub repository over https."""
    github_repository: RepositoryName | None = None
    """``PATCH_GITHUB_REPOSITORY``: ``owner/name``, where pull requests are opened."""
    base_branch: str = "main"
    """``PATCH_BASE_BRANCH``: what a patch starts from and is merged into."""
    done_state: str | None = None
    """``PATCH_DONE_STATE``: the workflow state of a merged story. Not set: the first `done` state of its workflow."""
    author: str = "patch flow <patch-flow@localhost>"
    """``PATCH_AUTHOR``: who the commits are by."""

    shortcut_token: SecretStr | None = Field(default=None, validation_alias="WEBHOOKS_SHORTCUT_TOKEN")
    shortcut_bot: str | None = Field(default=None, validation_alias="WEBHOOKS_SHORTCUT_BOT")
    """The member id of the token's owner: what that member does is never taken for a person's act."""
    github_token: SecretStr | None = Field(default=None, validation_alias="WEBHOOKS_GITHUB_TOKEN")
    shortcut_api: str = Field(default="https://api.app.shortcut.com/api/v3", validation_alias="SHORTCUT_API")
    github_api: str = Field(default="https://api.github.com", validation_alias="GITHUB_API")

    @field_validator("clarifier", "drafter")
    @classmethod
    def _splits_into_words(cls, value: str | None) -> str | None:
        if value is not None:
            shlex.split(value)
        return value


def settings() -> Settings:
    """The settings as the environment has them now; raises pydantic's `ValidationError` for one that does not fit."""
    return Settings()


def needed(value: T | None, name: str, purpose: str) -> T:
    """`value`, or, where it is not set, the end of the phase: only a person can go on from there.

    Raises:
        Escalate: naming the variable to set and what it is for.
    """
    if value is None:
        raise Escalate(f"set {name}: {purpose}")
    return value
