"""A request to a data route: who asks, and the format of its body and of its answer."""

from __future__ import annotations

from typing import Any

import msgspec

from notify.errors import InvalidRequest
from notify.server.access.browsers import is_own_host, refuse_foreign_host, refuse_foreign_pages
from notify.server.access.principal import EVERYONE
from notify.settings import Settings
from notify.wire import JSON, MSGPACK, encode_json, encode_msgpack

PROBES = ("/livez", "/readyz")
"""Paths that are answered to anyone, and as directly as the data routes: orchestrators ask for them often."""


class Request:
    """One request to a data route, and the format of its body and of its answer."""

    __slots__ = (
        "authorization",
        "body",
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
        self.authorization = b""
        """The header, where access is on."""
        self.principal = EVERYONE
        """Who asks; UNVERIFIED while that is being found out."""
        self.packed = False
        self.retry_after = 0
        """Seconds after which refused items may be sent again; 0 where there are none."""
        self.names_worker = False
        """Its path began with the name of this worker."""
        self.polls = False
        """It only waits for something to hand out: of no use to a client that has gone."""

    def find_format(self, settings: Settings) -> None:
        """Set `packed`: of a body its type, else what the client accepts.

        Raises InvalidRequest for a content type or encoding that is not served, Forbidden for a foreign page's
        request.
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
            packed = _FORMATS.get(kind.partition(b";")[0].strip().lower())
            if packed is None:
                shown = kind.decode("latin-1")[:60]
                raise InvalidRequest(f"send {JSON} or {MSGPACK}, not {shown!r}", "unsupported_type", 415)
        self.packed = packed

    def decode(self, decoders: tuple[Any, Any]) -> Any:
        """The body by its schema. Raises InvalidRequest (400 where it is malformed, 422 where a type is wrong)."""
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


_WITH_BODY = ("POST", "PUT")
_OF_BROWSERS = (b"origin", b"sec-fetch-site")

_FORMATS = {
    MSGPACK.encode(): True,
    b"application/x-msgpack": True,
    JSON.encode(): False,
    b"": False,
    b"application/x-www-form-urlencoded": False,  # what curl -d says
}
