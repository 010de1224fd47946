"""What a client shows to be let in: a token, a certificate, and whose server certificate it believes."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from notify.errors import InvalidRequest


def token_from_environment() -> str:
    """`NOTIFY_TOKEN`, or what is in the file `NOTIFY_TOKEN_FILE`; "" for none. Raises InvalidRequest."""
    token = os.environ.get("NOTIFY_TOKEN", "")
    file = os.environ.get("NOTIFY_TOKEN_FILE", "")
    if token or not file:
        return token.strip()
    try:
        return Path(file).read_text().strip()
    except OSError as error:
        raise InvalidRequest(f"NOTIFY_TOKEN_FILE: {file} cannot be read: {error.strerror}") from None


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
