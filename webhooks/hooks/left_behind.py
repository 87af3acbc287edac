"""The record of hooks that we registered, on disk, so that one left behind by a kill is found again.

One file a hook, in `<WEBHOOKS_HOME>/hooks`. It is written before the provider is asked, a line is added with each step,
and it is locked while its process lives: whatever killed that, the lock is gone with it. It also holds the secret made
for the hook, which a receiver started with `serve --dev` accepts as long as the file is there.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from webhooks.errors import ConfigurationError
from webhooks.hooks.target import KINDS, ProviderName, Target
from webhooks.sources.reading import is_object, sequence

if sys.platform != "win32":
    import fcntl

State = Literal["planned", "asked", "made", "reused", "lasting"]
"""How far it got: `planned`: nothing was asked yet; `asked`: the provider was, and what it did is not known here;
`made`: the hook is there, and ours to remove; `reused`: somebody else's, which stays; `lasting`: made to stay."""

FOLDER = "hooks"
_SUFFIX = ".jsonl"


@dataclass(frozen=True, slots=True)
class Entry:
    """What a record says.

    Args:
        path: the record.
        target: where the hook is registered.
        source: whose deliveries it sends.
        url: where it sends to.
        secret: what was made for it, None where it got a secret of the receiver's.
        made_at: when the record was begun, in ISO 8601.
        state: how far it got.
        id: the provider's name for it, None while that is not known.
        before: the hooks that sent there before one was asked for, so that none of them is ours.
    """

    path: Path
    target: Target
    source: str
    url: str
    secret: str | None = field(repr=False)
    made_at: str
    state: State
    id: str | None
    before: tuple[str, ...] = ()


class Record:
    """A record that this process holds.

    Attributes:
        state: how far it got.
        path: where it is.
    """

    def __init__(self, path: Path, descriptor: int, state: State) -> None:
        self.state: State = state
        self.path = path
        self._descriptor = descriptor

    def note(self, state: State, id: str | None = None, *, before: Sequence[str] = ()) -> None:
        """Add how far it got, and what sent there before; on disk when this returns."""
        self.state = state
        os.write(self._descriptor, _line({"state": state, "id": id, "before": list(before) or None}))
        os.fsync(self._descriptor)

    def remove(self) -> None:
        """Take the record away: there is no hook of it any more."""
        self.path.unlink(missing_ok=True)


@contextmanager
def record(
    home: Path, target: Target, source: str, url: str, *, secret: str | None = None, state: State = "planned"
) -> Generator[Record]:
    """Begin a record, and hold it for the block. It stays on disk while there is a hook of ours that it leads to.

    Raises:
        ConfigurationError: it cannot be written, so nothing may be registered.
    """
    said = {
        "provider": target.provider,
        "repository": target.repository,
        "source": source,
        "url": url,
        "secret": secret,
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "state": state,
        "id": None,
    }
    folder = home / FOLDER
    name = secrets.token_hex(8)
    path, draft = folder / f"{name}{_SUFFIX}", folder / f".{name}"
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        try:
            _lock(descriptor)
            os.write(descriptor, _line(said))
            os.fsync(descriptor)
            # It appears whole and locked already, so that nobody takes it for one left behind.
            draft.rename(path)
            _sync(folder)
        except BaseException:
            os.close(descriptor)
            draft.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigurationError(f"cannot keep a record of the hook in {folder}: {error.strerror}") from None
    begun = Record(path, descriptor, state)
    try:
        yield begun
    finally:
        if begun.state in ("planned", "reused"):
            begun.remove()
        os.close(descriptor)


def recorded(home: Path) -> list[Entry]:
    """Return what all records say, the oldest first; a file that is no record is passed over."""
    return sorted((entry for path in _paths(home) if (entry := _read(path))), key=lambda entry: entry.made_at)


@contextmanager
def left_behind(home: Path) -> Generator[list[Entry]]:
    """Yield the records whose process ended without removing its hook, and hold them for the block.

    Lasting ones are not among them. Two processes that start at once do not both see to the same one.
    """
    with ExitStack() as held:
        taken = [path for path in list(_paths(home)) if held.enter_context(_taken(path))]
        # Read once it is held: its process may have gone on until then.
        found = [entry for path in taken if (entry := _read(path)) and entry.state != "lasting"]
        yield sorted(found, key=lambda entry: entry.made_at)


def hook_secrets(home: Path) -> dict[str, tuple[str, ...]]:
    """Return, by source, the secrets that were made for hooks on record."""
    found: dict[str, tuple[str, ...]] = {}
    for entry in recorded(home):
        if entry.secret is not None:
            found[entry.source] = (*found.get(entry.source, ()), entry.secret)
    return found


def forget(entry: Entry) -> None:
    """Take a record away whose hook is there no more."""
    entry.path.unlink(missing_ok=True)


def _paths(home: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from (path for path in (home / FOLDER).iterdir() if path.suffix == _SUFFIX)


def _read(path: Path) -> Entry | None:
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return None  # removed just now
    said: dict[str, Any] = {}
    for line in lines:
        with suppress(ValueError):  # a line cut short by a power cut
            found = json.loads(line)
            if is_object(found):
                said.update({key: value for key, value in found.items() if value is not None})
    provider: ProviderName | None = next((name for name in KINDS if name == said.get("provider")), None)
    state = next((one for one in get_args(State) if one == said.get("state")), None)
    texts = [said.get(key) for key in ("source", "url", "made_at")]
    if provider is None or state is None or not all(isinstance(text, str) for text in texts):
        return None
    source, url, made_at = map(str, texts)
    target = Target(provider, said.get("repository"))
    before = tuple(id for id in sequence(said.get("before")) if isinstance(id, str))
    return Entry(path, target, source, url, said.get("secret"), made_at, state, said.get("id"), before)


def _line(said: dict[str, Any]) -> bytes:
    return json.dumps(said).encode() + b"\n"


def _lock(descriptor: int) -> None:
    if sys.platform != "win32":
        fcntl.flock(descriptor, fcntl.LOCK_EX)


@contextmanager
def _taken(path: Path) -> Generator[bool]:
    """Hold a record for the block, unless a living process holds it or it is gone; say which."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        yield False  # removed just now
        return
    try:
        if sys.platform != "win32":
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        taken = path.exists()
    except OSError:
        taken = False
    try:
        yield taken
    finally:
        os.close(descriptor)


def _sync(folder: Path) -> None:
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
