"""A client shows a token from a text, a file that changes, or a function; and TLS files that are renewed."""

from __future__ import annotations

import logging
import os
import ssl
from pathlib import Path

import pytest

from notify.client.transport.login import TOKEN_SECONDS, TlsFiles, Token
from notify.errors import InvalidRequest
from tests.support.authority import Authority


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


def test_a_process_may_go_to_another_directory(
    file: Path, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon goes to /, and a handler anywhere: the files of relative paths are those of the start."""
    authority = Authority(tmp_path, "ca")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NOTIFY_TOKEN_FILE", file.name)
    token, files = Token(None, clock.monotonic), TlsFiles(authority.file.name)
    before = files.context()
    monkeypatch.chdir("/")
    file.write_text("second\n")
    assert token.instead_of(shown("first")) == shown("second")
    os.utime(authority.file, ns=(0, 0))
    assert files.context() is not before


def test_a_refused_token_is_read_again_at_once(file: Path, clock: Clock) -> None:
    token = Token(None, clock.monotonic)
    assert token.instead_of(shown("first")) is None  # the file has no other token
    file.write_text("second\n")
    assert token.instead_of(shown("first")) == shown("second")
    file.write_text("third\n")
    assert token.instead_of(shown("first")) == shown("second")  # many are refused at once: one of them reads


def test_an_unreadable_token_file_keeps_the_previous_token(
    file: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_a_token_that_is_given_as_text_is_never_read_again(file: Path, clock: Clock) -> None:
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


def test_a_file_that_is_not_text_is_refused_with_a_sentence(file: Path) -> None:
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequest, match=r"NOTIFY_TOKEN_FILE: .* cannot be read: it is not text"):
        Token(None)


class Secret:
    """A directory of TLS files as Kubernetes mounts a secret: its files are links through `..data`, a link itself."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._count = 0
        for name in ("ca.crt", "tls.crt", "tls.key"):
            (directory / name).symlink_to(Path("..data") / name)

    def write(self, authority: Authority, *, without: str = "") -> None:
        """Replace all files at once, by new ones with the same names; `without`: the file that is empty."""
        self._count += 1
        made = self.directory / f"..{self._count}"
        made.mkdir()
        whole = authority.issue(f"client{self._count}").read_text()
        at = whole.index("-----BEGIN PRIVATE KEY")
        texts = {"ca.crt": authority.file.read_text(), "tls.crt": whole[:at], "tls.key": whole[at:]}
        for name, text in texts.items():
            (made / name).write_text("" if name == without else text)
        (self.directory / "..new").symlink_to(made.name)
        os.replace(self.directory / "..new", self.directory / "..data")

    def files(self) -> TlsFiles:
        return TlsFiles(*(str(self.directory / name) for name in ("ca.crt", "tls.crt", "tls.key")))


def trusted(context: ssl.SSLContext) -> list[str]:
    """The names of the authorities that a context trusts."""
    return [dict(pair[0] for pair in made["subject"])["commonName"] for made in context.get_ca_certs()]  # type: ignore[misc]


@pytest.fixture
def secret(tmp_path: Path) -> Secret:
    (tmp_path / "secret").mkdir()
    return Secret(tmp_path / "secret")


def test_files_behind_a_link_that_is_swung_are_read_again(secret: Secret, tmp_path: Path) -> None:
    secret.write(Authority(tmp_path, "first"))
    files = secret.files()
    first = files.context()
    assert trusted(first) == ["first"] and files.context() is first
    secret.write(Authority(tmp_path, "second"))
    second = files.context()
    assert trusted(second) == ["second"] and files.context() is second


@pytest.mark.parametrize("without", ["ca.crt", "tls.crt", "tls.key"])
def test_files_that_are_not_whole_yet_leave_those_before(
    secret: Secret, tmp_path: Path, without: str, caplog: pytest.LogCaptureFixture
) -> None:
    secret.write(Authority(tmp_path, "first"))
    files = secret.files()
    first = files.context()
    with caplog.at_level(logging.WARNING, "notify.client"):
        secret.write(Authority(tmp_path, "second"), without=without)
        assert files.context() is first and files.context() is first
    assert len(caplog.records) == 1 and "the previous ones stay in use" in caplog.text
    secret.write(Authority(tmp_path, "third"))
    assert trusted(files.context()) == ["third"]


def test_a_certificate_that_is_replaced_before_its_key_waits_for_it(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    whole = [authority.issue(name).read_text() for name in ("one", "two")]
    halves = [(text[: text.index("-----BEGIN PRIVATE")], text[text.index("-----BEGIN PRIVATE") :]) for text in whole]
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    certificate.write_text(halves[0][0])
    key.write_text(halves[0][1])
    files = TlsFiles(str(authority.file), str(certificate), str(key))
    first = files.context()
    (tmp_path / "new").write_text(halves[1][0])
    os.replace(tmp_path / "new", certificate)
    assert files.context() is first
    key.unlink()
    assert files.context() is first
    key.write_text(halves[1][1])
    assert files.context() is not first


def test_files_that_cannot_be_read_at_the_start_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="NOTIFY_CA, NOTIFY_CERTIFICATE or NOTIFY_KEY cannot be read"):
        TlsFiles(str(tmp_path / "missing"))
