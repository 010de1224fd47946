"""The token that a client shows: from a text, a file that changes, or a function."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from notify.client.login import TOKEN_SECONDS, Token
from notify.errors import InvalidRequest


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "token"
    path.write_text("first\n")
    monkeypatch.delenv("NOTIFY_TOKEN", raising=False)
    monkeypatch.setenv("NOTIFY_TOKEN_FILE", str(path))
    return path


def shown(token: str) -> str:
    return f"authorization: Bearer {token}\r\n"


def test_a_file_is_read_again_after_a_while(file: Path, clock: Clock) -> None:
    token = Token(None, clock.monotonic)
    file.write_text("second\n")
    clock.now += TOKEN_SECONDS - 0.1
    assert token.header() == shown("first")
    clock.now += 0.1
    assert token.header() == shown("second")


def test_a_refused_token_is_read_again_at_once(file: Path, clock: Clock) -> None:
    token = Token(None, clock.monotonic)
    assert token.instead_of(shown("first")) is None  # the file has no other token
    file.write_text("second\n")
    assert token.instead_of(shown("first")) == shown("second")
    file.write_text("third\n")
    assert token.instead_of(shown("first")) == shown("second")  # many are refused at once: one of them reads


def test_what_cannot_be_read_leaves_the_one_before(file: Path, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    token = Token(None, clock.monotonic)
    with caplog.at_level(logging.WARNING, "notify.client"):
        for wrong in ("", "no token\nat all"):
            file.write_text(wrong)
            for _ in range(3):
                clock.now += TOKEN_SECONDS
                assert token.header() == shown("first")
        file.unlink()
        for _ in range(3):
            assert token.instead_of(shown("first")) is None
    assert len(caplog.records) == 3  # each reason is logged once
    file.write_text("second\n")
    assert token.instead_of(shown("first")) == shown("second")


def test_a_function_gives_the_token(clock: Clock) -> None:
    given = ["first"]
    token = Token(lambda: given[-1], clock.monotonic)
    given.append("second")
    assert token.header() == shown("first")
    assert token.instead_of(shown("first")) == shown("second")
    given.append("third")
    clock.now += TOKEN_SECONDS
    assert token.header() == shown("third")


def test_a_text_stays(file: Path, clock: Clock) -> None:
    token = Token("given", clock.monotonic)
    clock.now += TOKEN_SECONDS
    assert token.header() == shown("given") and token.instead_of(shown("given")) is None
    assert Token("").header() == ""


def test_a_client_begins_with_a_token_that_is_one(file: Path) -> None:
    for wrong in ("two words", "ünïcode", "line\nline"):
        with pytest.raises(InvalidRequest, match="characters"):
            Token(wrong)
    file.unlink()
    with pytest.raises(InvalidRequest, match="cannot be read"):
        Token(None)


def test_a_file_that_is_no_text_is_refused_with_a_sentence(file: Path) -> None:
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequest, match=r"NOTIFY_TOKEN_FILE: .* cannot be read: it is no text"):
        Token(None)
