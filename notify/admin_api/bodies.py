"""A message's body in words, where its bytes would tell a person nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from notify.admin_api.words import size
from notify.protocol.large_bodies import ENCODING, PLACE, ZSTD, reference_of


def describe_body(message: Mapping[str, Any]) -> str:
    """Where the body of a message lies, or how it is compressed; empty if the message has it as it was sent.

    `message`: as the routes show it, with `body` or `body_base64`.
    """
    headers = message.get("headers") or {}
    if not isinstance(headers, Mapping):
        return ""
    encoding = f", compressed ({ZSTD})" if headers.get(ENCODING) == ZSTD else ""
    if PLACE in headers:
        reference = reference_of(str(message.get("body", "")))
        if reference is None:
            return ""
        return f"in a store{encoding}: {reference.url}, {size(reference.size)}, SHA-256 {reference.sha256}"
    if encoding:
        encoded = str(message.get("body_base64", ""))
        length = len(encoded) * 3 // 4 - encoded.count("=") if encoded else len(str(message.get("body", "")).encode())
        return f"{size(length)}{encoding}"
    return ""
