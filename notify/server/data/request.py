"""A request to a data route: its principal, and the format of its body and of its answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from notify.errors import InvalidRequest
from notify.protocol.wire import JSON, MSGPACK, encode_json, encode_msgpack
from notify.server.access.browsers import is_own_host, refuse_foreign_host, refuse_foreign_pages
from notify.server.access.principal import EVERYONE
from notify.server.settings import Settings

PROBES = ("/livez", "/readyz")
"""Paths that are answered without a token, and as directly as data routes: orchestrators call them often."""


class Request:
    """One request to a data route, and the format of its body and of its answer."""

    __slots__ = (
        "authorization",
        "body",
        "dropped",
        "headers",
        "method",
        "names_worker",
        "packed",
        "path",
        "polls",
        "principal",
        "query",
        "retry_after",
    )

    def __init__(self, method: str, path: str, query: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        """`headers` with names in lower case; the body is set when it is complete."""
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        self.body = b""
        self.dropped: Callable[[], None] | None = None
        """Called when the body is dropped before the request is answered."""
        self.authorization = b""
        """The value of the header `authorization` if access is on."""
        self.principal = EVERYONE
        """The sender; UNVERIFIED while it is being verified."""
        self.packed = False
        self.retry_after = 0
        """Seconds after which refused items may be sent again; 0 if none may."""
        self.names_worker = False
        """The path began with the name of this worker."""
        self.polls = False
        """It waits for messages or checks: it can be cancelled when the client has gone."""

    def find_format(self, settings: Settings) -> None:
        """Set `packed` from the type of the body, or without a body from the types that the client accepts.

        Raises InvalidRequest if the content type or encoding is not supported, Forbidden if another site's page sent
        the request.
        """
        kind = accepted = host = b""
        from_browser = False
        for name, value in self.headers:
            if name == b"content-type":
                kind = value
            elif name == b"accept":
                accepted = value
            elif name == b"content-encoding" and value.lower() != b"identity":
                raise InvalidRequest("compressed bodies are not taken", "unsupported_encoding", 415)
            elif name == b"host":
                host = value
            elif name in _OF_BROWSERS:
                from_browser = True
        if from_browser:
            refuse_foreign_pages(self.method, self.headers, settings)
        elif not settings.access and not is_own_host(host, settings.host, settings.url):
            refuse_foreign_host(host, settings)
        if self.method not in _WITH_BODY:
            self.packed = b"msgpack" in accepted
            return
        packed = _FORMATS.get(kind)
        if packed is None:
            packed = _FORMATS.get(media_type(kind))
            if packed is None:
                content_type = kind.decode("latin-1")[:60]
                raise InvalidRequest(f"send {JSON} or {MSGPACK}, not {content_type!r}", "unsupported_type", 415)
        self.packed = packed

    def drop_body(self) -> None:
        """Free the body, which is decoded, while the request waits."""
        self.body = b""
        if self.dropped is not None:
            self.dropped()

    def decode(self, decoders: tuple[Any, Any]) -> Any:
        """The decoded body. Raises InvalidRequest (400 if it is malformed, 422 if it does not fit the schema)."""
        try:
            return decoders[self.packed](self.body)
        except msgspec.ValidationError as error:
            raise InvalidRequest(str(error), "invalid_schema") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            kind = "msgpack" if self.packed else "JSON"
            raise InvalidRequest(f"the body is not {kind}: {error}", "malformed", 400) from None
        except RecursionError:
            raise InvalidRequest("the body is nested too deeply", "malformed", 400) from None

    def encode(self, value: Any) -> bytes:
        return encode_msgpack(value) if self.packed else encode_json(value)


def media_type(kind: bytes) -> bytes:
    """The media type of a Content-Type, in lower case. Raises InvalidRequest for a charset other than UTF-8: a text of
    another one may also be valid UTF-8, and would be another text."""
    kind, *parameters = kind.lower().split(b";")
    for parameter in parameters:
        name, _, charset = parameter.partition(b"=")
        if name.strip() == b"charset" and charset.strip(b' \t"') not in _CHARSETS:
            raise InvalidRequest(
                f"send text in UTF-8, not in {charset.decode('latin-1')[:60]!r}", "unsupported_type", 415
            )
    return kind.strip()


_WITH_BODY = ("POST", "PUT")
_CHARSETS = (b"utf-8", b"utf8", b"us-ascii")
_OF_BROWSERS = (b"origin", b"sec-fetch-site")

_FORMATS = {
    MSGPACK.encode(): True,
    b"application/x-msgpack": True,
    JSON.encode(): False,
    b"": False,
    b"application/x-www-form-urlencoded": False,  # the type that curl -d sends
}
