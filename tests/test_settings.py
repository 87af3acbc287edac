"""Settings and secrets: what is read, what is refused, and that no secret shows."""

from __future__ import annotations

import base64
import errno
import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from pydantic import ValidationError

from webhooks.errors import ConfigurationError
from webhooks.settings import Settings
from webhooks.source_secrets import dev_secrets, previous_secrets, secrets_for


def test_an_empty_environment_gives_the_documented_defaults() -> None:
    settings = Settings.load()

    assert settings.database_url is None
    assert settings.home == Path(".webhooks")
    assert settings.lease == timedelta(seconds=60)
    assert settings.max_body_bytes == 26 * 1024 * 1024
    assert (settings.max_attempts, settings.backoff_base_s, settings.backoff_max_s) == (5, 5, 600)
    assert (settings.concurrency, settings.deliveries_concurrency) == (4, 10)
    assert (settings.poll_s, settings.sweep_s, settings.drain_s) == (1, 15, 20)
    assert settings.prepare


def test_every_variable_is_read_and_described(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "DATABASE_URL": "postgresql://somewhere/db",
        "WEBHOOKS_DIRECT_URL": "postgresql://elsewhere/db",
        "WEBHOOKS_SCHEMA": "tenant_7",
        "WEBHOOKS_PREPARE": "off",
        "WEBHOOKS_HOME": "/var/lib/webhooks",
        "WEBHOOKS_CONTROL_TOKEN": "token",
        "WEBHOOKS_CONTROL_HOSTS": "hooks.internal, hooks",
        "WEBHOOKS_TUNNEL_TOKEN": "another token",
        "WEBHOOKS_LOG_LEVEL": "debug",
        "WEBHOOKS_MAX_BODY_MIB": "3",
        "WEBHOOKS_UNVERIFIED_MIB": "5",
        "WEBHOOKS_MAX_EVENTS": "70",
        "WEBHOOKS_REJECTIONS_KEPT": "50",
        "WEBHOOKS_REJECTIONS_MIB": "6",
        "WEBHOOKS_REJECTIONS_DAYS": "8",
        "WEBHOOKS_LEASE_S": "0.5",
        "WEBHOOKS_POLL_S": "2",
        "WEBHOOKS_SWEEP_S": "4",
        "WEBHOOKS_MAX_ATTEMPTS": "7",
        "WEBHOOKS_BACKOFF_BASE_S": "1",
        "WEBHOOKS_BACKOFF_MAX_S": "60",
        "WEBHOOKS_CONCURRENCY": "9",
        "WEBHOOKS_DELIVERIES_CONCURRENCY": "11",
        "WEBHOOKS_DRAIN_S": "0",
        "WEBHOOKS_KEEP_ALIVE_S": "60",
        "WEBHOOKS_SHUTDOWN_DELAY_S": "5",
        "WEBHOOKS_NOTIFY_URL": "https://pager.example/hook",
        "WEBHOOKS_NOTIFY_SECRET": "whsec_c2VjcmV0",
        "WEBHOOKS_PRUNE_EVERY_S": "3600",
        "WEBHOOKS_KEEP_BODIES": "7d",
        "WEBHOOKS_KEEP_HEADERS": "1w",
        "WEBHOOKS_KEEP_KEYS": "off",
        "WEBHOOKS_KEEP_ATTEMPTS": "12h",
        "WEBHOOKS_KEEP_EFFECTS": "365d",
        "WEBHOOKS_GITHUB_TOKEN": "ghp_invented",
        "GITHUB_API": "https://github.example/api/v3",
        "WEBHOOKS_GITHUB_APP_ID": "12345",
        "WEBHOOKS_GITHUB_APP_KEY_FILE": "/etc/webhooks/app.pem",
        "WEBHOOKS_SHORTCUT_TOKEN": "invented-as-well",
        "SHORTCUT_API": "https://shortcut.example/api/v3",
        "WEBHOOKS_RECONCILE_GITHUB": "acme/app:12",
        "WEBHOOKS_RECONCILE_SHORTCUT": "on",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    settings = Settings.load()

    assert set(Settings.variables()) == set(given)
    assert all(description.endswith(".") for description in Settings.variables().values())
    assert all(getattr(settings, name) != field.default for name, field in Settings.model_fields.items())
    assert settings.lease == timedelta(milliseconds=500)
    assert settings.prepare is False
    assert settings.control_host_names == {"hooks.internal", "hooks"}


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "")
    monkeypatch.setenv("WEBHOOKS_LEASE_S", "")

    assert Settings.load().database_url is None
    assert Settings.load().lease_s == 60


def test_settings_are_frozen() -> None:
    settings = Settings.load()

    with pytest.raises(ValidationError, match="frozen"):
        setattr(settings, "lease_s", 1)  # noqa: B010 - the type checkers would refuse the plain assignment


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WEBHOOKS_LEASE_S", "soon"),
        ("WEBHOOKS_LEASE_S", "nan"),
        ("WEBHOOKS_LEASE_S", "inf"),
        ("WEBHOOKS_LEASE_S", "0"),
        ("WEBHOOKS_DRAIN_S", "-1"),
        ("WEBHOOKS_MAX_ATTEMPTS", "0"),
        ("WEBHOOKS_CONCURRENCY", "1.5"),
        ("WEBHOOKS_MAX_BODY_MIB", "100000"),
        ("WEBHOOKS_PREPARE", "perhaps"),
        ("WEBHOOKS_SCHEMA", 'x"; DROP SCHEMA public'),
    ],
)
def test_a_value_that_makes_no_sense_is_one_line_naming_the_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)

    with pytest.raises(ConfigurationError) as raised:
        Settings.load()
    assert str(raised.value).startswith(f"{name}: ")
    assert repr(value) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_every_wrong_variable_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEBHOOKS_LEASE_S", "soon")
    monkeypatch.setenv("WEBHOOKS_POLL_S", "often")

    with pytest.raises(ConfigurationError, match=r"WEBHOOKS_LEASE_S: .*; WEBHOOKS_POLL_S: "):
        Settings.load()


def test_passwords_and_tokens_stay_out_of_a_printed_settings_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://user:hunter2@host/db")
    monkeypatch.setenv("WEBHOOKS_DIRECT_URL", "postgresql://user:hunter2@host/db")
    monkeypatch.setenv("WEBHOOKS_CONTROL_TOKEN", "hunter2")

    assert "hunter2" not in repr(Settings.load())


def test_a_source_without_a_secret_has_none() -> None:
    assert secrets_for("github") == ()


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("one", ("one",)),
        ("new, old", ("new", "old")),
        (" new ,,old,", ("new", "old")),
        ("", ()),
    ],
)
def test_several_secrets_are_separated_by_commas(
    monkeypatch: pytest.MonkeyPatch, value: str, found: tuple[str, ...]
) -> None:
    monkeypatch.setenv("WEBHOOKS_SECRET_GITHUB", value)

    assert secrets_for("github") == found


def test_the_variable_is_the_upper_cased_name_with_underscores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEBHOOKS_SECRET_GITHUB_STAGING", "one")

    assert secrets_for("github-staging") == ("one",)


@pytest.mark.parametrize(
    ("content", "secret"),
    [
        (b"s3cret", ("s3cret",)),
        (b"s3cret\n", ("s3cret",)),
        (b"s3cret\r\n", ("s3cret",)),
        (b"s3cret\n\n", ("s3cret",)),
        (b"old\n\r\nnew", ("old", "new")),
        (b"\xef\xbb\xbfs3cret\r\n", ("s3cret",)),
        ("\u200bs3cret\u2060\n".encode(), ("s3cret",)),
        ("s3cret\u00a0\n".encode(), ("s3cret",)),
        (b" a,b \n", (" a,b ",)),
        ("naïve\n".encode(), ("naïve",)),
    ],
)
def test_a_secret_file_holds_one_secret_a_line_without_what_cannot_be_seen_around_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes, secret: tuple[str, ...]
) -> None:
    file = tmp_path / "secret"
    file.write_bytes(content)
    monkeypatch.setenv("WEBHOOKS_SECRET_GITHUB_FILE", str(file))

    assert secrets_for("github") == secret


def test_a_variable_is_freed_of_what_cannot_be_seen_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEBHOOKS_SECRET_GITHUB", "\ufeffold\u200b,\u00a0 new\u00a0")
    monkeypatch.setenv("WEBHOOKS_SECRET_GITHUB_PREVIOUS", "older\u200b")

    assert secrets_for("github") == ("old", "new")
    assert previous_secrets("github") == ("older",)


@pytest.mark.parametrize("content", [b"", b"\n", b"\xef\xbb\xbf\n", b"\xff\xfe"])
def test_a_secret_file_that_holds_no_text_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "secret"
    file.write_bytes(content)
    monkeypatch.setenv("WEBHOOKS_SECRET_GITHUB_FILE", str(file))

    with pytest.raises(ConfigurationError, match=f"WEBHOOKS_SECRET_GITHUB_FILE: {file} is"):
        secrets_for("github")


def test_a_secret_file_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WEBHOOKS_SECRET_GITHUB_FILE", str(tmp_path / "missing"))

    with pytest.raises(ConfigurationError, match=r"WEBHOOKS_SECRET_GITHUB_FILE: cannot read .*missing: No such file"):
        secrets_for("github")


def test_a_secret_and_a_secret_file_together_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WEBHOOKS_SECRET_GITHUB", "hunter2")
    monkeypatch.setenv("WEBHOOKS_SECRET_GITHUB_FILE", str(tmp_path / "missing"))

    with pytest.raises(ConfigurationError, match="both set") as raised:
        secrets_for("github")
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("value", [",", " , ", "hunter\udcff"])
def test_a_secret_that_cannot_be_used_is_refused_without_showing_it(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("WEBHOOKS_SECRET_GITHUB", value)

    with pytest.raises(ConfigurationError, match="WEBHOOKS_SECRET_GITHUB") as raised:
        secrets_for("github")
    assert "hunter" not in str(raised.value)


def test_a_secret_of_dev_is_made_once_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    home = tmp_path / "home"
    [secret] = dev_secrets(home, "shortcut")

    assert len(secret) >= 32
    assert dev_secrets(home, "shortcut") == (secret,)
    assert dev_secrets(home, "github") != (secret,)
    assert stat.S_IMODE((home / "secrets" / "shortcut").stat().st_mode) == 0o600
    assert stat.S_IMODE((home / "secrets").stat().st_mode) == 0o700
    assert sorted(path.name for path in (home / "secrets").iterdir()) == ["github", "shortcut"]


def test_a_secret_of_dev_that_was_opened_to_others_is_closed_again(tmp_path: Path) -> None:
    dev_secrets(tmp_path, "shortcut")
    (tmp_path / "secrets").chmod(0o755)
    (tmp_path / "secrets" / "shortcut").chmod(0o644)
    dev_secrets(tmp_path, "shortcut")

    assert stat.S_IMODE((tmp_path / "secrets" / "shortcut").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "secrets").stat().st_mode) == 0o700


def test_a_secret_of_dev_that_is_there_is_read_without_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system may be read-only by now."""
    [secret] = dev_secrets(tmp_path, "shortcut")

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("chmod", "mkdir"):
        monkeypatch.setattr(Path, name, read_only)
    assert dev_secrets(tmp_path, "shortcut") == (secret,)


def test_all_who_start_at_once_get_the_same_secret_of_dev(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as executor:
        found = set(executor.map(lambda _: dev_secrets(tmp_path, "shortcut"), range(64)))

    assert len(found) == 1


def test_a_secret_of_dev_for_a_source_that_decodes_it_is_32_bytes(tmp_path: Path) -> None:
    [secret] = dev_secrets(tmp_path, "standard", "whsec")

    assert secret.startswith("whsec_")
    assert len(base64.b64decode(secret.removeprefix("whsec_"), validate=True)) == 32


@pytest.mark.parametrize("name", ["../github", "", ".", "a/b", "-x", "a\n"])
def test_a_source_name_that_is_no_file_name_gets_no_secret_of_dev(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="source name"):
        dev_secrets(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_a_secret_of_dev_that_cannot_be_kept_is_an_error_with_the_path(tmp_path: Path) -> None:
    (tmp_path / "secrets").write_text("in the way")

    with pytest.raises(ConfigurationError, match=f"cannot keep a secret in {tmp_path}"):
        dev_secrets(tmp_path, "github")
