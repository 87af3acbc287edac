"""Settings from the environment, and the secrets of sources.

Every variable is one field of `Settings`; a secret belongs to a source and is looked up by its name.
Whatever is wrong with one ends as one line that names the variable and never shows a secret.
"""

from __future__ import annotations

import base64
import os
import re
import secrets
from contextlib import suppress
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
        pattern=r"^[a-z_][a-z0-9_]{0,62}$",
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


def secrets_for(source: str) -> tuple[str, ...]:
    """Return the secrets of a source: several while one is being replaced, none when none is set.

    They are the comma-separated parts of ``WEBHOOKS_SECRET_<SOURCE>``, or the whole file that
    ``WEBHOOKS_SECRET_<SOURCE>_FILE`` names, less one trailing newline.

    Args:
        source: the source's name; upper-cased, and with `_` for `-`, it ends the variable's name.

    Raises:
        ConfigurationError: both variables are set, or the one that is set holds no secret that can be used.
    """
    variable = secret_variable(source)
    listed, path = os.environ.get(variable), os.environ.get(f"{variable}_FILE")
    if listed and path:
        raise ConfigurationError(f"{variable} and {variable}_FILE are both set: keep one")
    if path:
        return (_read_secret(f"{variable}_FILE", Path(path)),)
    if not listed:
        return ()
    found = tuple(part for part in (part.strip() for part in listed.split(",")) if part)
    if not found:
        raise ConfigurationError(f"{variable} holds no secret, only separators")
    if any("\udc80" <= character <= "\udcff" for character in listed):
        raise ConfigurationError(f"{variable} is not UTF-8 text")
    return found


def secret_variable(source: str) -> str:
    """Return the name of the variable that holds the secrets of a source."""
    return f"WEBHOOKS_SECRET_{source.upper().replace('-', '_')}"


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


def dev_secrets(home: Path, source: str, kind: Literal["text", "whsec"] = "text") -> tuple[str, ...]:
    """Return the secret that `serve --dev` uses for a source without one, made on first use and kept.

    It is kept in ``<home>/secrets/<source>``, which only its owner can read; two processes that start at once agree.

    Args:
        home: the directory of `WEBHOOKS_HOME`.
        source: the source's name.
        kind: ``whsec`` for a source that decodes its secret: ``whsec_`` and 32 bytes in base64.

    Raises:
        ConfigurationError: the name cannot be a file name, or the file cannot be made or read.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", source):
        raise ConfigurationError(f"source name {source!r}: use letters, digits, - and _")
    directory = home / "secrets"
    kept = directory / source
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        directory.chmod(0o700)
        if not kept.exists():
            _keep(kept, _new_secret(kind))
        kept.chmod(0o600)
    except OSError as error:
        raise ConfigurationError(f"cannot keep a secret in {kept}: {error.strerror}") from None
    return (_read_secret("the secret of --dev", kept),)


def secrets_found(home: Path, source: str) -> tuple[str, ...]:
    """Return the secrets of a source as a `serve` of this directory has them; none where there is none.

    Those of its variable, else the one that `serve --dev` made in `home`; nothing is made here.

    Raises:
        ConfigurationError: what is set cannot be used.
    """
    return secrets_for(source) or (dev_secrets(home, source) if (home / "secrets" / source).exists() else ())


def previous_secrets(source: str) -> tuple[str, ...]:
    """Return the secrets that a source had before, from `WEBHOOKS_SECRET_<SOURCE>_PREVIOUS`, separated by commas.

    Nothing is accepted with them: they only explain why a request was refused.
    """
    listed = os.environ.get(f"{secret_variable(source)}_PREVIOUS", "")
    return tuple(part for part in (part.strip() for part in listed.split(",")) if part)


def _new_secret(kind: Literal["text", "whsec"]) -> str:
    if kind == "whsec":
        return "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
    return secrets.token_urlsafe(32)


def _keep(path: Path, secret: str) -> None:
    """Write a secret so that it appears whole or not at all, and the first of two processes wins."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secret + "\n")
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _read_secret(variable: str, path: Path) -> str:
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise ConfigurationError(f"{variable}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{variable}: {path} is not UTF-8 text") from None
    secret = text.removesuffix("\n").removesuffix("\r")
    if not secret:
        raise ConfigurationError(f"{variable}: {path} is empty")
    return secret


def _reason(variable: str, message: str, given: object) -> str:
    field = next(f for f in Settings.model_fields.values() if f.validation_alias == variable)
    # A field that stays out of `repr` may hold a password.
    shown = f", not {given!r}" if field.repr else ""
    return f"{variable}: {message[:1].lower()}{message[1:]}{shown}"
