"""The first token: a server may die at any moment, and no credential is left whose token nobody has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from notify.server.access import tokens
from notify.server.access.credential import Credential
from notify.server.configuration.first_token import leave_first_token
from notify.server.configuration.records import Records
from notify.server.database import open_database


class Died(BaseException):
    """Stands for the death of the process."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "data"
    made.mkdir()
    return made


@pytest.fixture
def records(tmp_path: Path) -> Iterator[Records]:
    database = open_database(str(tmp_path))
    yield Records(database)
    database.dispose()


def is_token_of(path: Path, credential: Credential) -> bool:
    return tokens.is_proved(path.read_bytes().strip(), credential.proof)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_it_is_made_once(records: Records, directory: Path, tmp_path: Path) -> None:
    leave_first_token(records, directory, 1)
    (credential,) = records.credentials()
    assert names(directory) == ["admin.token"] and is_token_of(directory / "admin.token", credential)
    assert (directory / "admin.token").stat().st_mode & 0o777 == 0o600
    assert (credential.rights, records.versions()) == (("admin", "view"), {"credentials": 1})
    # Later starts and later servers make no token and touch no file.
    later = tmp_path / "later"
    later.mkdir()
    (later / "admin.token").write_text("of another registry")
    for place in (directory, later):
        leave_first_token(records, place, 2)
    assert records.credentials() == [credential] and is_token_of(directory / "admin.token", credential)
    assert (later / "admin.token").read_text() == "of another registry" and names(later) == ["admin.token"]
    assert [action["target"] for action in records.actions(10)] == ["admin"]


def test_a_death_before_the_credential_is_recorded(
    records: Records, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(credential: Credential) -> None:
        raise Died

    with monkeypatch.context() as patched, pytest.raises(Died):
        patched.setattr(records, "add_first_credential", die)
        leave_first_token(records, directory, 1)
    assert records.credentials() == []
    leave_first_token(records, directory, 2)
    (credential,) = records.credentials()
    assert names(directory) == ["admin.token"] and is_token_of(directory / "admin.token", credential)


def test_a_death_after_the_credential_is_recorded(
    records: Records, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = records.add_first_credential

    def add_and_die(credential: Credential) -> None:
        add(credential)
        raise Died

    with monkeypatch.context() as patched, pytest.raises(Died):
        patched.setattr(records, "add_first_credential", add_and_die)
        leave_first_token(records, directory, 1)
    (credential,) = records.credentials()
    assert "admin.token" not in names(directory)
    leave_first_token(records, directory, 2)
    assert records.credentials() == [credential]
    assert names(directory) == ["admin.token"] and is_token_of(directory / "admin.token", credential)


def test_two_servers_in_one_directory(records: Records, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers share a directory: one has finished while the other is about to record its credential."""
    add = records.add_first_credential

    def come_later(credential: Credential) -> None:
        monkeypatch.setattr(records, "add_first_credential", add)
        leave_first_token(records, directory, 1)
        add(credential)

    monkeypatch.setattr(records, "add_first_credential", come_later)
    leave_first_token(records, directory, 2)
    (credential,) = records.credentials()
    assert names(directory) == ["admin.token"] and is_token_of(directory / "admin.token", credential)
