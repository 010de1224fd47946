"""A request's head: the data request that it begins, and the head without a demand for another protocol."""

from __future__ import annotations

import urllib.parse

import httptools
from httptools import HttpRequestParser

from notify.errors import WrongShard
from notify.server.access.principal import NOBODY
from notify.server.data.request import PROBES, Request
from notify.server.settings import Settings

Fields = list[tuple[bytes, bytes]]
"""Header fields: (name in lower case, value)."""

WORKER = b"/worker-"
"""The beginning of the path of a request for one of several workers."""
_PROBES = tuple(path.encode() for path in PROBES)


def data_request(method: bytes, url: bytes, headers: Fields, names_worker: bool) -> Request | None:
    """The request without its body; None if FastAPI answers it: it is neither for a data route nor for everyone.

    `names_worker`: whether the path began with this worker's name.
    """
    if url in _PROBES and method in (b"GET", b"HEAD"):
        request = Request(method.decode("latin-1"), url.decode(), b"", headers)
        request.principal = NOBODY
        return request
    if not url.startswith(b"/"):
        try:
            parsed = httptools.parse_url(url)
        except httptools.HttpParserInvalidURLError:
            return None
        url = parsed.path + (b"?" + parsed.query if parsed.query else b"")
    if not url.startswith(b"/v1/") or url.startswith(b"/v1/admin"):
        return _open_request(method, url, headers)
    raw_path, _, query = url.partition(b"?")
    path = raw_path.decode("latin-1")
    if "%" in path:
        # `unquote` of text takes a hundred times as long for escapes between other characters.
        path = urllib.parse.unquote_to_bytes(raw_path).decode("utf-8", "replace")
    request = Request(method.decode("latin-1"), path, query, headers)
    request.names_worker = names_worker
    return request


def _open_request(method: bytes, url: bytes, headers: Fields) -> Request | None:
    """The request if it is for what anyone may see of the console: the page to sign in, and the console's files."""
    path, _, query = url.partition(b"?")
    if method not in (b"GET", b"HEAD") or not (path == b"/login" or path.startswith(b"/static/")):
        return None
    request = Request(method.decode("latin-1"), path.decode("latin-1"), query, headers)
    request.principal = NOBODY
    return request


def own_path(url: bytes, settings: Settings) -> tuple[bytes, bool] | None:
    """(the path without this worker's name in front, whether it had the name: then only this worker may answer). None
    if the path names another worker: a connection belongs to one worker until its end."""
    if not url.startswith(WORKER):
        return url, False
    name, slash, rest = url[1:].partition(b"/")
    text = name.decode("latin-1")
    if text not in settings.key_shards:
        return url, False
    return (b"/" + rest if slash else b"/", True) if text == settings.shard else None


def another_worker() -> WrongShard:
    """The error for a request that names another worker than the connection's."""
    return WrongShard("this connection is another worker's: make one for each", shard="")


def without_upgrade(parser: HttpRequestParser, url: bytes, headers: Fields) -> bytes:
    """The head that a parser has read, as bytes without the field `Upgrade`."""
    version = parser.get_http_version().encode()
    lines = [parser.get_method() + b" " + url + b" HTTP/" + version]
    lines += [name + b": " + value for name, value in headers if name != b"upgrade"]
    return b"\r\n".join((*lines, b"", b""))
