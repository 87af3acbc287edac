"""The secrets of sources: from the environment, from files, and those that `serve --dev` makes.

A secret belongs to a source and is looked up by its name; no message shows one.
"""

from __future__ import annotations

import base64
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Literal

from webhooks.errors import ConfigurationError

# A byte order mark (a zero-width no-break space), the other zero-width ones, no-break spaces, line ends.
UNSEEN = "\ufeff\u200b\u200c\u200d\u2060\u00a0\u202f\r\n"


def secrets_for(source: str) -> tuple[str, ...]:
    """Return the secrets of a source: several while one is being replaced, none when none is set.

    They are the comma-separated parts of ``WEBHOOKS_SECRET_<SOURCE>``, or the lines of the file that
    ``WEBHOOKS_SECRET_<SOURCE>_FILE`` names. What nobody means to be a part of a secret and an editor or a copy leaves
    around it is taken away: a byte order mark, zero-width and no-break spaces, empty lines.

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
        return read_secret_file(f"{variable}_FILE", Path(path))
    if not listed:
        return ()
    found = tuple(part for part in (bare(part).strip() for part in listed.split(",")) if part)
    if not found:
        raise ConfigurationError(f"{variable} holds no secret, only separators")
    if any("\udc80" <= character <= "\udcff" for character in listed):
        raise ConfigurationError(f"{variable} is not UTF-8 text")
    return found


def secret_variable(source: str) -> str:
    """Return the name of the variable that holds the secrets of a source."""
    return f"WEBHOOKS_SECRET_{source.upper().replace('-', '_')}"


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
        if not kept.exists():
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
            directory.mkdir(mode=0o700, exist_ok=True)
            _keep(kept, _new_secret(kind))
        for path, mode in ((directory, 0o700), (kept, 0o600)):
            if path.stat().st_mode & 0o077:
                path.chmod(mode)
    except OSError as error:
        raise ConfigurationError(f"cannot keep a secret in {kept}: {error.strerror}") from None
    return read_secret_file("the secret of --dev", kept)


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
    return tuple(part for part in (bare(part).strip() for part in listed.split(",")) if part)


def secret_file(source: str) -> Path | None:
    """Return the file that holds the secrets of a source, where one is named."""
    path = os.environ.get(f"{secret_variable(source)}_FILE")
    return Path(path) if path else None


def bare(secret: str) -> str:
    """Return a secret without what cannot be seen at either end: nobody's secret begins or ends with it."""
    return secret.strip(UNSEEN)


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


def read_secret_file(variable: str, path: Path) -> tuple[str, ...]:
    """Return the secrets in a file, one a line.

    Args:
        variable: what names the file, for the message.
        path: the file.

    Raises:
        ConfigurationError: it cannot be read, is not UTF-8 text, or holds no secret.
    """
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise ConfigurationError(f"{variable}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{variable}: {path} is not UTF-8 text") from None
    found = tuple(secret for secret in (bare(line) for line in text.split("\n")) if secret)
    if not found:
        raise ConfigurationError(f"{variable}: {path} is empty")
    return found
