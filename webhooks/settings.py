"""Settings from the environment.

Every variable is one field of `Settings`.
Whatever is wrong with one ends as one line that names the variable and never shows a secret.
"""

from __future__ import annotations

import os
import re
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, SettingsConfigDict

from webhooks.errors import ConfigurationError

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=10_000)]

_DURATION = re.compile(r"([0-9]{1,6})\s*([smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_LONGEST = timedelta(days=36_500)


def duration(text: str) -> timedelta:
    """Read `45s`, `90m`, `12h`, `30d` or `2w`.

    Raises:
        ValueError: it is none of these, or nothing at all long.
    """
    found = _DURATION.fullmatch(text.strip().lower())
    length = timedelta(**{_UNITS[found[2]]: int(found[1])}) if found else timedelta(0)
    if not timedelta(0) < length <= _LONGEST:
        raise ValueError(f"write 90m, 12h, 30d or 2w, not {text!r}")
    return length


def _age(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return None if value.strip().lower() == "off" else duration(value)
    except ValueError:
        raise PydanticCustomError("age", "write 90m, 12h, 30d, 2w, or off for ever") from None


Age = Annotated[timedelta | None, BeforeValidator(_age)]
"""How long something is kept; None: for ever."""


class Settings(BaseSettings):
    """The environment, read once and frozen. Build it with `Settings.load()`, which raises our own error."""

    model_config = SettingsConfigDict(
        frozen=True, case_sensitive=True, env_ignore_empty=True, extra="ignore", populate_by_name=True
    )

    database_url: str | None = Field(
        default=None,
        validation_alias="DATABASE_URL",
        repr=False,
        description="PostgreSQL 14 or newer. Without it an embedded PostgreSQL is started under `WEBHOOKS_HOME`.",
    )
    direct_url: str | None = Field(
        default=None,
        validation_alias="WEBHOOKS_DIRECT_URL",
        repr=False,
        description="The same database past a transaction pooler; LISTEN uses it.",
    )
    schema_name: str | None = Field(
        default=None,
        validation_alias="WEBHOOKS_SCHEMA",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,62}$",
        description="The database schema that holds the tables. Without it `search_path` decides.",
    )
    prepare: bool = Field(
        default=True,
        validation_alias="WEBHOOKS_PREPARE",
        description="Prepared statements, `on` or `off`; `off` behind a transaction pooler.",
    )
    home: Path = Field(
        default=Path(".webhooks"),
        validation_alias="WEBHOOKS_HOME",
        description="The directory of the embedded PostgreSQL and of the secrets that `serve --dev` makes.",
    )
    control_token: str | None = Field(
        default=None,
        validation_alias="WEBHOOKS_CONTROL_TOKEN",
        repr=False,
        description="What a caller of the control plane must present; without it only programs here may ask.",
    )
    control_hosts: str | None = Field(
        default=None,
        validation_alias="WEBHOOKS_CONTROL_HOSTS",
        description="Names, comma-separated, by which the control plane is asked besides those of this machine.",
    )
    tunnel_token: str | None = Field(
        default=None,
        validation_alias="WEBHOOKS_TUNNEL_TOKEN",
        repr=False,
        description="What `webhooks tunnel` shows to the control plane of the deployed consumer.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info",
        validation_alias="WEBHOOKS_LOG_LEVEL",
        description="The lowest level of log lines shown; `debug` has one for each accepted delivery.",
    )
    max_body_mib: int = Field(
        default=26,
        validation_alias="WEBHOOKS_MAX_BODY_MIB",
        ge=1,
        le=256,
        description="The largest body accepted, in MiB; past it the answer is 413.",
    )
    unverified_mib: int = Field(
        default=256,
        validation_alias="WEBHOOKS_UNVERIFIED_MIB",
        ge=1,
        le=65_536,
        description="Memory, in MiB, for all bodies being read and not yet verified; past it, long ones get 503.",
    )
    keep_alive_s: Seconds = Field(
        default=75,
        validation_alias="WEBHOOKS_KEEP_ALIVE_S",
        description="Seconds a connection to the receiver may rest between two requests; longer than the proxy's own.",
    )
    shutdown_delay_s: float = Field(
        default=0,
        validation_alias="WEBHOOKS_SHUTDOWN_DELAY_S",
        ge=0,
        le=600,
        allow_inf_nan=False,
        description="Seconds in which a stopping process is not ready but still takes deliveries: for a load balancer.",
    )
    max_events: int = Field(
        default=10_000,
        validation_alias="WEBHOOKS_MAX_EVENTS",
        ge=1,
        le=1_000_000,
        description="The events that one delivery may be split into; one that holds more is stored, and dead.",
    )
    rejections_kept: int = Field(
        default=1000,
        validation_alias="WEBHOOKS_REJECTIONS_KEPT",
        ge=0,
        le=100_000,
        description="Refused requests kept for `webhooks rejections`, at most; 0 keeps none.",
    )
    rejections_mib: int = Field(
        default=64,
        validation_alias="WEBHOOKS_REJECTIONS_MIB",
        ge=1,
        le=65_536,
        description="Their bodies and headers, in MiB, at most.",
    )
    rejections_days: int = Field(
        default=7,
        validation_alias="WEBHOOKS_REJECTIONS_DAYS",
        ge=1,
        le=3650,
        description="Days after which a refused request is forgotten.",
    )
    lease_s: Seconds = Field(
        default=60,
        validation_alias="WEBHOOKS_LEASE_S",
        description="Seconds a claim lasts without renewal; the `lease=` of a phase wins.",
    )
    poll_s: Seconds = Field(
        default=1,
        validation_alias="WEBHOOKS_POLL_S",
        description="Seconds between two looks for work that nobody announced.",
    )
    sweep_s: Seconds = Field(
        default=15,
        validation_alias="WEBHOOKS_SWEEP_S",
        description="Seconds between two sweeps for expired leases, at most; a quarter of the shortest lease if less.",
    )
    max_attempts: Count = Field(
        default=5,
        validation_alias="WEBHOOKS_MAX_ATTEMPTS",
        description="Attempts until a row is escalated or a delivery is dead; the `max_attempts=` of a phase wins.",
    )
    backoff_base_s: Seconds = Field(
        default=5,
        validation_alias="WEBHOOKS_BACKOFF_BASE_S",
        description="Seconds to wait after the first failed attempt; doubled after every further one.",
    )
    backoff_max_s: Seconds = Field(
        default=600,
        validation_alias="WEBHOOKS_BACKOFF_MAX_S",
        description="Seconds to wait after a failed attempt, at most.",
    )
    concurrency: Count = Field(
        default=4,
        validation_alias="WEBHOOKS_CONCURRENCY",
        description="Claims that one process works on at once in a phase; the `concurrency=` of a phase wins.",
    )
    deliveries_concurrency: Count = Field(
        default=10,
        validation_alias="WEBHOOKS_DELIVERIES_CONCURRENCY",
        description="Deliveries that one process applies at once.",
    )
    drain_s: float = Field(
        default=20,
        validation_alias="WEBHOOKS_DRAIN_S",
        ge=0,
        le=86_400,
        allow_inf_nan=False,
        description="Seconds that running work may take to end after SIGTERM, before it is cancelled.",
    )

    notify_url: str | None = Field(
        default=None,
        validation_alias="WEBHOOKS_NOTIFY_URL",
        pattern=r"^https?://[^\s/]",
        repr=False,
        description="Where each escalation is told, by a signed POST (Standard Webhooks); without it nobody is told.",
    )
    notify_secret: str | None = Field(
        default=None,
        validation_alias="WEBHOOKS_NOTIFY_SECRET",
        repr=False,
        description="What those are signed with: `whsec_` and base64.",
    )

    github_token: str | None = Field(
        default=None,
        validation_alias="WEBHOOKS_GITHUB_TOKEN",
        repr=False,
        description="Reads GitHub's delivery log, asks for redeliveries and registers hooks (`admin:repo_hook`).",
    )
    github_api: str = Field(
        default="https://api.github.com",
        validation_alias="GITHUB_API",
        pattern=r"^https?://[^\s/]",
        description="Where GitHub's REST API is.",
    )
    github_app_id: str | None = Field(
        default=None,
        validation_alias="WEBHOOKS_GITHUB_APP_ID",
        pattern=r"^[A-Za-z0-9._-]+$",
        description="The GitHub App whose own delivery log `reconcile github --app` reads: its id or client id.",
    )
    github_app_key_file: Path | None = Field(
        default=None,
        validation_alias="WEBHOOKS_GITHUB_APP_KEY_FILE",
        description="The file with that app's private key (PEM).",
    )
    shortcut_token: str | None = Field(
        default=None,
        validation_alias="WEBHOOKS_SHORTCUT_TOKEN",
        repr=False,
        description="Reads stories and their history, and registers hooks.",
    )
    shortcut_api: str = Field(
        default="https://api.app.shortcut.com/api/v3",
        validation_alias="SHORTCUT_API",
        pattern=r"^https?://[^\s/]",
        description="Where Shortcut's REST API v3 is.",
    )
    reconcile_github: str | None = Field(
        default=None,
        validation_alias="WEBHOOKS_RECONCILE_GITHUB",
        description="What `serve --reconcile-every` looks after: `OWNER/NAME:HOOK`, `org:ORG:HOOK`, `app`, by commas.",
    )
    reconcile_shortcut: str | None = Field(
        default=None,
        validation_alias="WEBHOOKS_RECONCILE_SHORTCUT",
        description="`on`, or the source's name where there are several: `serve --reconcile-every` reads histories.",
    )

    prune_every_s: Annotated[float, Field(ge=1, le=604_800, allow_inf_nan=False)] | None = Field(
        default=None,
        validation_alias="WEBHOOKS_PRUNE_EVERY_S",
        description="Seconds between two prunings by `serve` or `work`; without it only `webhooks prune` removes.",
    )
    keep_bodies: Age = Field(
        default=timedelta(days=30),
        validation_alias="WEBHOOKS_KEEP_BODIES",
        description="How long the bodies of finished deliveries are kept, such as `30d`; `off` for ever.",
    )
    keep_headers: Age = Field(
        default=timedelta(days=30),
        validation_alias="WEBHOOKS_KEEP_HEADERS",
        description="The same for their headers.",
    )
    keep_keys: Age = Field(
        default=timedelta(days=90),
        validation_alias="WEBHOOKS_KEEP_KEYS",
        description="How long finished deliveries are kept at all: by its key a late copy is known.",
    )
    keep_attempts: Age = Field(
        default=timedelta(days=90),
        validation_alias="WEBHOOKS_KEEP_ATTEMPTS",
        description="How long attempts, heartbeat runs and notifications that have ended are kept.",
    )
    keep_effects: Age = Field(
        default=timedelta(days=90),
        validation_alias="WEBHOOKS_KEEP_EFFECTS",
        description="How long effects are kept that no attempt can need any more.",
    )

    @classmethod
    def load(cls) -> Settings:
        """Read the environment. An empty variable counts as unset.

        Raises:
            ConfigurationError: a variable cannot be read; the message names it.
        """
        try:
            return cls()
        except ValidationError as error:
            reasons = (_reason(str(e["loc"][0]), e["msg"], e["input"]) for e in error.errors(include_url=False))
            raise ConfigurationError("; ".join(reasons)) from None

    @classmethod
    def variables(cls) -> dict[str, str]:
        """Return every variable with its description, for help texts and for the test that holds the documents true."""
        return {str(field.validation_alias): field.description or "" for field in cls.model_fields.values()}

    @property
    def max_body_bytes(self) -> int:
        """The largest body accepted, in bytes."""
        return self.max_body_mib * 1024 * 1024

    @property
    def unverified_bytes(self) -> int:
        """Memory for bodies that are not yet verified, in bytes; one body of the largest size always fits."""
        return max(self.unverified_mib * 1024 * 1024, self.max_body_bytes)

    @property
    def control_host_names(self) -> frozenset[str]:
        """The names of `WEBHOOKS_CONTROL_HOSTS`."""
        return frozenset(name.strip() for name in (self.control_hosts or "").split(",") if name.strip())

    @property
    def lease(self) -> timedelta:
        """How long a claim lasts without renewal."""
        return timedelta(seconds=self.lease_s)


def keep_keys_for(source: str, settings: Settings) -> timedelta | None:
    """Return how long the deliveries of a source are kept, None for ever: `WEBHOOKS_KEEP_KEYS_<SOURCE>`, or as all are.

    Raises:
        ConfigurationError: the variable cannot be read.
    """
    variable = f"WEBHOOKS_KEEP_KEYS_{source.upper().replace('-', '_')}"
    given = os.environ.get(variable)
    if not given:
        return settings.keep_keys
    try:
        return None if given.strip().lower() == "off" else duration(given)
    except ValueError:
        raise ConfigurationError(f"{variable}: write 90m, 12h, 30d, 2w, or off for ever, not {given!r}") from None


def _reason(variable: str, message: str, given: object) -> str:
    field = next(f for f in Settings.model_fields.values() if f.validation_alias == variable)
    # A field that stays out of `repr` may hold a password.
    shown = f", not {given!r}" if field.repr else ""
    return f"{variable}: {message[:1].lower()}{message[1:]}{shown}"
