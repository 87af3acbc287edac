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

    model_config = SettingsConfigDict(frozen=True, case_sensitive=True, env_ignore_empty=True, extra="ignore")

    label: str = Field(
        default="patch",
        validation_alias="PATCH_LABEL",
        description="The label that opens a session.",
    )
    clarifier: str | None = Field(
        default=None,
        validation_alias="PATCH_CLARIFIER",
        description='Reads the story (JSON), prints `{"questions": [...]}` or `{}`. Without it nothing is asked.',
    )
    drafter: str | None = Field(
        default=None,
        validation_alias="PATCH_DRAFTER",
        description="Runs in a checkout of the repository, reads the story (JSON), prints a unified diff.",
    )
    github_repository: RepositoryName | None = Field(
        default=None,
        validation_alias="PATCH_GITHUB_REPOSITORY",
        description="`owner/name`: the repository to patch, where pull requests are opened.",
    )
    repository: str | None = Field(
        default=None,
        validation_alias="PATCH_REPOSITORY",
        description="What git fetches from and pushes to. Without it the GitHub repository, over https.",
    )
    base_branch: str = Field(
        default="main",
        validation_alias="PATCH_BASE_BRANCH",
        description="What a patch starts from and is merged into.",
    )
    author: str = Field(
        default="patch flow <patch-flow@localhost>",
        validation_alias="PATCH_AUTHOR",
        description="Who the commits are by.",
    )
    done_state: str | None = Field(
        default=None,
        validation_alias="PATCH_DONE_STATE",
        description="The workflow state of a merged story. Without it the first `done` state of its workflow.",
    )
    shortcut_token: SecretStr | None = Field(
        default=None,
        validation_alias="WEBHOOKS_SHORTCUT_TOKEN",
        description="Reads, comments and moves stories.",
    )
    shortcut_bot: str | None = Field(
        default=None,
        validation_alias="WEBHOOKS_SHORTCUT_BOT",
        description="The member id of that token's owner, whose acts are never taken for a person's.",
    )
    github_token: SecretStr | None = Field(
        default=None,
        validation_alias="WEBHOOKS_GITHUB_TOKEN",
        description="Pushes branches to github.com and opens pull requests.",
    )
    shortcut_api: str = Field(
        default="https://api.app.shortcut.com/api/v3",
        validation_alias="SHORTCUT_API",
        description="Where Shortcut's REST API v3 is.",
    )
    github_api: str = Field(
        default="https://api.github.com",
        validation_alias="GITHUB_API",
        description="Where GitHub's REST API is.",
    )

    @field_validator("clarifier", "drafter")
    @classmethod
    def _splits_into_words(cls, value: str | None) -> str | None:
        if value is not None:
            shlex.split(value)
        return value

    @classmethod
    def variables(cls) -> dict[str, str]:
        """Every variable with its description, for the test that holds the documents true."""
        return {str(field.validation_alias): field.description or "" for field in cls.model_fields.values()}


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


def unset_tokens() -> list[str]:
    """One warning that names the tokens without which phases escalate; none when all are set."""
    now = settings()
    given = {
        "WEBHOOKS_SHORTCUT_TOKEN": now.shortcut_token,
        "WEBHOOKS_SHORTCUT_BOT": now.shortcut_bot,
        "WEBHOOKS_GITHUB_TOKEN": now.github_token,
    }
    missing = [name for name, value in given.items() if value is None]
    return [f"not set: {', '.join(missing)}; a phase that needs one escalates and names it"] if missing else []
