"""How a client authenticates: its token, its TLS certificate, and the authorities that it trusts."""

from __future__ import annotations

import logging
import os
import ssl
import time
from collections.abc import Callable

from notify.errors import InvalidRequest, NotifyError
from notify.text_files import text_of

log = logging.getLogger("notify.client")

TOKEN_SECONDS = 10.0
"""A token from a file or a function is read again after this time, and whenever a server refuses the current token."""

EXCHANGES = 8
"""How often one request is sent again, each time with a new token, because its token was refused: a long poll may
outlive several tokens."""

Shown = str | Callable[[], str] | None
"""A token, or a function that returns the current token without blocking; None: the token of the environment."""


def token_from_environment() -> str:
    """`NOTIFY_TOKEN`, or the content of the file `NOTIFY_TOKEN_FILE`; "" without both. Raises InvalidRequest."""
    token = os.environ.get("NOTIFY_TOKEN", "")
    file = os.environ.get("NOTIFY_TOKEN_FILE", "")
    if token or not file:
        return token.strip()
    return text_of("NOTIFY_TOKEN_FILE", file).strip()


class Token:
    """The token of a client, which is read again while the client lives, since a file or function may change it."""

    def __init__(self, given: Shown, monotonic: Callable[[], float] = time.monotonic) -> None:
        """`monotonic`: a clock in seconds. Raises InvalidRequest if `given` is not a token, or cannot be read."""
        self._monotonic = monotonic
        self._read: Callable[[], str] | None = None
        if callable(given):
            self._read = given
        elif given is None:
            self._read = token_from_environment
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


def tls_from_environment() -> ssl.SSLContext:
    """A TLS context that trusts the authorities in `NOTIFY_CA` (default: the system's), with the client certificate
    `NOTIFY_CERTIFICATE` if it is set.

    `NOTIFY_KEY` is the certificate's key, if it is in another file. Raises InvalidRequest.
    """
    ca, certificate = os.environ.get("NOTIFY_CA"), os.environ.get("NOTIFY_CERTIFICATE")
    try:
        context = ssl.create_default_context(cafile=ca or None)
        if certificate:
            context.load_cert_chain(certificate, os.environ.get("NOTIFY_KEY") or None)
    except (OSError, ssl.SSLError) as error:
        raise InvalidRequest(f"NOTIFY_CA, NOTIFY_CERTIFICATE or NOTIFY_KEY cannot be read: {error}") from None
    return context
