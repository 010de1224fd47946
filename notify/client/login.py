"""The proofs of a client that asks to be let in: a token, a certificate, and whose server certificate it believes."""

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
"""A token from a file or a function is read again so often, and whenever a server refuses the one that is shown."""

EXCHANGES = 8
"""How often one request is sent again because its token was refused, each time with another one: a poll may outlive
several."""

Shown = str | Callable[[], str] | None
"""A token, or a function that gives the one to show now, without blocking; None: what the environment says."""


def token_from_environment() -> str:
    """`NOTIFY_TOKEN`, or what is in the file `NOTIFY_TOKEN_FILE`; "" for none. Raises InvalidRequest."""
    token = os.environ.get("NOTIFY_TOKEN", "")
    file = os.environ.get("NOTIFY_TOKEN_FILE", "")
    if token or not file:
        return token.strip()
    return text_of("NOTIFY_TOKEN_FILE", file).strip()


class Token:
    """The proof that a client shows while it lives: a file or a function may give another token meanwhile."""

    def __init__(self, given: Shown) -> None:
        """Raises InvalidRequest for what is no token, and where none can be read."""
        self._read: Callable[[], str] | None = None
        if callable(given):
            self._read = given
        elif given is None:
            self._read = token_from_environment
        self._read_at = time.monotonic()
        self._complaint = ""
        self._header = _header(given if self._read is None else _asked(self._read))

    def header(self) -> str:
        """The line of a request's head, with its end; empty where nothing is shown."""
        if self._read is not None and time.monotonic() - self._read_at >= TOKEN_SECONDS:
            self._read_again()
        return self._header

    def instead_of(self, refused: str) -> str | None:
        """The line to show after a server refused this one; None where there is no other."""
        if self._header == refused:
            self._read_again()
        return None if self._header == refused else self._header

    def _read_again(self) -> None:
        """Another token from now on, if there is one; where none can be read, the one before stays."""
        if self._read is None:
            return
        self._read_at = time.monotonic()
        try:
            header = _header(self._read())
        except Exception as error:  # of the user's own function
            self._complain(f"{type(error).__name__}: {error}", None if isinstance(error, OSError) else error)
        else:
            if header or not self._header:
                self._header, self._complaint = header, ""
            else:
                self._complain("it is empty")  # a file that is being written

    def _complain(self, why: str, error: Exception | None = None) -> None:
        if why != self._complaint:
            self._complaint = why
            log.warning("the token could not be read again, the one before is shown on: %s", why, exc_info=error)


def _asked(function: Callable[[], object]) -> object:
    """The token that a function gives at the start. Raises InvalidRequest where it fails."""
    try:
        return function()
    except NotifyError:
        raise
    except Exception as error:
        raise InvalidRequest(f"the function that gives the token raised {type(error).__name__}: {error}") from error


def _header(token: object) -> str:
    """Raises InvalidRequest for what is no token."""
    if token is None or token == "":
        return ""
    if not isinstance(token, str):
        raise InvalidRequest(f"a token is text, not {type(token).__name__}")
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise InvalidRequest("the token is not one: it has characters that no token has")
    return f"authorization: Bearer {token}\r\n"


def tls_from_environment() -> ssl.SSLContext:
    """Believes the authorities in `NOTIFY_CA` (default: the system's), and shows `NOTIFY_CERTIFICATE` if it is set.

    `NOTIFY_KEY` is the certificate's key, where that is another file. Raises InvalidRequest.
    """
    ca, certificate = os.environ.get("NOTIFY_CA"), os.environ.get("NOTIFY_CERTIFICATE")
    try:
        context = ssl.create_default_context(cafile=ca or None)
        if certificate:
            context.load_cert_chain(certificate, os.environ.get("NOTIFY_KEY") or None)
    except (OSError, ssl.SSLError) as error:
        raise InvalidRequest(f"NOTIFY_CA, NOTIFY_CERTIFICATE or NOTIFY_KEY cannot be read: {error}") from None
    return context
