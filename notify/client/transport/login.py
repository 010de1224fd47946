"""How a client authenticates: its token, its TLS certificate, and the authorities that it trusts."""

from __future__ import annotations

import functools
import os
import ssl
import time
from collections.abc import Callable

from notify.errors import InvalidRequest, NotifyError
from notify.runtime.environment import text_of, value_of
from notify.runtime.program_log import program_log

log = program_log("notify.client")

TOKEN_SECONDS = 10.0
"""A token from a file or a function is read again after this time, and whenever a server refuses the current token."""

EXCHANGES = 8
"""How often one request is sent again, each time with a new token, because its token was refused: a long poll may
outlive several tokens."""

Shown = str | Callable[[], str] | None
"""A token, or a function that returns the current token without blocking; None: the token of the environment."""


def token_from_environment(directory: str = "") -> str:
    """`NOTIFY_TOKEN`, or the content of the file `NOTIFY_TOKEN_FILE`; "" without both. `directory`: where a relative
    path begins; "": in the current directory. Raises InvalidRequest."""
    token, file = value_of("NOTIFY_TOKEN"), value_of("NOTIFY_TOKEN_FILE")
    if token or not file:
        return token
    return text_of("NOTIFY_TOKEN_FILE", os.path.join(directory, file)).strip()


def _here() -> str:
    """The current directory; "" if it was removed. Files are read again later, when a program that became a daemon, or
    a handler, may have changed it."""
    try:
        return os.getcwd()
    except OSError:
        return ""


class Token:
    """The token of a client, which is read again while the client lives, since a file or function may change it."""

    def __init__(self, given: Shown, monotonic: Callable[[], float] = time.monotonic) -> None:
        """`monotonic`: a clock in seconds. Raises InvalidRequest if `given` is not a token, or cannot be read."""
        self._monotonic = monotonic
        self._read: Callable[[], str] | None = None
        if callable(given):
            self._read = given
        elif given is None:
            self._read = functools.partial(token_from_environment, _here())
        self._read_at = self._monotonic()
        self._complaint = ""
        self._header = _header(given if self._read is None else _first_token(self._read))

    def header(self) -> str:
        """The header line of a request, with its line end; empty without a token."""
        if self._read is not None and self._monotonic() - self._read_at >= TOKEN_SECONDS:
            self._read_again()
        return self._header

    def instead_of(self, refused: str) -> str | None:
        """The header line to send after a server refused the line `refused`; None if there is no new token."""
        if self._header == refused:
            self._read_again()
        return None if self._header == refused else self._header

    def _read_again(self) -> None:
        """Read the token again. If this fails, the previous token stays."""
        if self._read is None:
            return
        self._read_at = self._monotonic()
        try:
            header = _header(self._read())
        except Exception as error:  # the user's function may raise anything
            self._complain(f"{type(error).__name__}: {error}", None if isinstance(error, OSError) else error)
        else:
            if header or not self._header:
                self._header, self._complaint = header, ""
            else:
                self._complain("it is empty")  # the file is probably being written

    def _complain(self, why: str, error: Exception | None = None) -> None:
        if why != self._complaint:
            self._complaint = why
            log.warning("the token could not be read again, the previous one stays in use: %s", why, exc_info=error)


def _first_token(function: Callable[[], object]) -> object:
    """The first token of a user's function. Raises InvalidRequest if the function fails."""
    try:
        return function()
    except NotifyError:
        raise
    except Exception as error:
        raise InvalidRequest(f"the function that gives the token raised {type(error).__name__}: {error}") from error


def _header(token: object) -> str:
    """The header line for a token. Raises InvalidRequest if `token` is not a token."""
    if token is None or token == "":
        return ""
    if not isinstance(token, str):
        raise InvalidRequest(f"a token is text, not {type(token).__name__}")
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise InvalidRequest("the token is invalid: it has characters that no token has")
    return f"authorization: Bearer {token}\r\n"


class TlsFiles:
    """The TLS context of a client, recreated whenever one of its files was replaced.

    Certificates are renewed while a client lives: by a rename, by a link that is changed to another directory (as
    Kubernetes does), or in place.
    """

    def __init__(
        self,
        ca: str | None,
        certificate: str | None = None,
        key: str | None = None,
        *,
        adjust: Callable[[ssl.SSLContext], None] = lambda context: None,
    ) -> None:
        """`ca`: a file with the authorities to trust; None: the system's. `certificate`: the client's, with its key,
        which may be in the file `key`. `adjust` changes each new context. Raises InvalidRequest if a file cannot be
        read."""
        self._ca, self._certificate, self._key = (
            path and os.path.join(_here(), path) for path in (ca, certificate, key)
        )
        self._adjust = adjust
        self._complaint = ""
        self._versions = self._versions_now()
        try:
            self._context = self._read()
        except (OSError, ssl.SSLError) as error:
            raise InvalidRequest(
                f"NOTIFY_CA, NOTIFY_CERTIFICATE or NOTIFY_KEY cannot be read ({self._names()}): {error}"
            ) from None

    def context(self) -> ssl.SSLContext:
        """The context for a new connection. While changed files cannot be read, or do not fit together because not all
        of them are replaced yet, the previous context stays."""
        versions = self._versions_now()
        if versions != self._versions:
            try:
                self._context = self._read()
            except (OSError, ssl.SSLError) as error:
                self._complain(str(error))
            else:
                self._versions, self._complaint = versions, ""
        return self._context

    def _read(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self._ca)
        if self._certificate:
            context.load_cert_chain(self._certificate, self._key)
        self._adjust(context)
        return context

    def _versions_now(self) -> list[tuple[int, int, int] | None]:
        """A value that changes when one of the files is written or replaced."""
        system = ssl.get_default_verify_paths()
        authorities = (self._ca,) if self._ca else (system.cafile, system.capath)
        return [_version(path) for path in (*authorities, self._certificate, self._key) if path]

    def _names(self) -> str:
        return ", ".join(path for path in (self._ca, self._certificate, self._key) if path)

    def _complain(self, why: str) -> None:
        if why != self._complaint:
            self._complaint = why
            log.warning(
                "the renewed TLS files %s could not be read, the previous ones stay in use: %s",
                self._names(),
                why,
            )


def _version(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None  # the file is being replaced at this moment
    return status.st_ino, status.st_size, status.st_mtime_ns


def tls_files_from_environment() -> TlsFiles:
    """The authorities in `NOTIFY_CA` (default: the system's) and the client certificate `NOTIFY_CERTIFICATE` if it is
    set.

    `NOTIFY_KEY` is the certificate's key, if it is in another file. Raises InvalidRequest.
    """
    ca, certificate, key = value_of("NOTIFY_CA"), value_of("NOTIFY_CERTIFICATE"), value_of("NOTIFY_KEY")
    return TlsFiles(ca or None, certificate or None, (key or None) if certificate else None)
