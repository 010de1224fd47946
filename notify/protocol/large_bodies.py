"""Bodies that are not in their message as they were sent: the headers that say so, and references to stored ones."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from notify.protocol.limits import NAME_CHARACTERS
from notify.protocol.wire import UNDECODABLE

PLACE = "notify-body"
"""The header of a message whose body lies in an object store; the message itself carries a Reference."""
STORED = "stored"
"""The value of this header."""
ENCODING = "content-encoding"
"""The header that says how a body is compressed."""
ZSTD = "zstd"
"""The only encoding that Notify's own producers and consumers use; others are left to the application."""

APART = frozenset((PLACE, ENCODING))
"""A message without these headers has its body itself."""
FOLDER = "notify-bodies"
"""The folder of a store with bodies. Nothing else of the store is ever listed, read or deleted for them."""
MODES = ("half", "auto", "outbox")
_NAME = (
    rf"{FOLDER}/[A-Za-z0-9_][A-Za-z0-9._-]{{0,{NAME_CHARACTERS - 1}}}/(?:{'|'.join(MODES)})/"
    r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
)
NAME = re.compile(_NAME + r"\Z")
"""The name of a body's object: `notify-bodies/{producer group}/{producer's mode}/{UUID}`. No other name is read, so
that a message cannot lead a consumer out of the folder."""
_MENTION = re.compile(_NAME.replace("/", r"\\?/").encode())
"""A name within any bytes. Some encoders of JSON, such as PHP's, write each slash of a text as `\\/`."""
MENTION_BYTES = 256
"""More bytes than a name has."""
STORED_BYTES = 256 << 20
"""The most bytes of a stored body: producers and consumers hold each in memory as a whole."""

_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


def mentioned(data: bytes) -> set[str]:
    """The names within any bytes. Storages find by it what they still name, whatever the state of the message."""
    return {name.replace(b"\\", b"").decode() for name in _MENTION.findall(data)}


class Reference(msgspec.Struct, frozen=True):
    """Where a body lies. Its JSON is the body of the message that is sent instead."""

    store: str
    """The URL of the store, as its producer knows it."""
    name: str
    """The name of the object in the store."""
    size: int
    sha256: str
    """The checksum of the object's bytes, in hexadecimal digits."""

    @property
    def url(self) -> str:
        """The address of the object, for people and other clients."""
        return f"{self.store}/{self.name}"

    def encoded(self) -> bytes:
        return msgspec.json.encode(self)


_decode = msgspec.json.Decoder(Reference).decode


def reference_of(body: bytes | str) -> Reference | None:
    """The reference in a message's body; None if the body is not one."""
    try:
        reference = _decode(body)
    except UNDECODABLE:
        return None
    is_valid = NAME.match(reference.name) and _SHA256.match(reference.sha256) and 0 <= reference.size <= STORED_BYTES
    return reference if is_valid else None


def lies_outside(headers: Mapping[str, str]) -> bool:
    """Whether a message's own bytes are not the body that was sent, but a reference to it, or compressed."""
    return PLACE in headers or headers.get(ENCODING) == ZSTD


def plain_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of a message once its body was read."""
    return {name: value for name, value in headers.items() if name not in (PLACE, ENCODING)}
