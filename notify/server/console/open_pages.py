"""The part of the console that anyone may see: the page to sign in, styles, scripts and their licences.

All of it is made once and kept, since anyone may ask for it at any rate. It is answered without FastAPI.
"""

from __future__ import annotations

import hashlib
import mimetypes
import re
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from markupsafe import escape

from notify.errors import NotFound
from notify.server.console.rendering import HERE, SECURITY, prefix_of, rendered, under

NEXT, REFUSED = "@next@", "@refused@"
"""Their places in the page that is kept."""
PATH_CHARACTERS = 2000
"""The longest path that a sign-in leads to."""
_OWN_PATH = re.compile(r"/(?!/)[A-Za-z0-9._~%/-]*(\?[A-Za-z0-9._~%/&=+:@,*-]*)?\Z")
_SECURITY = "".join(f"{name}: {value}\r\n" for name, value in SECURITY.items()).encode()


class OpenPage(NamedTuple):
    """An answer to a request that anyone may send."""

    status: int
    kind: str
    body: bytes
    fields: bytes
    """Lines of further headers."""
    is_kept: bool
    """The body is the one that other answers have, too."""


def open_page(path: str, query: bytes, headers: Iterable[tuple[bytes, bytes]]) -> OpenPage:
    """The page to sign in, or one of the console's files. Raises NotFound."""
    if path == "/login":
        headers = list(headers)
        body = login_page(own_path(_next_of(query)), prefix=prefix_of(headers))
        return OpenPage(200, "text/html; charset=utf-8", body, _SECURITY, is_kept=False)
    kept = _files().get(path)
    if kept is None:
        raise NotFound(f"there is no GET {path[:100]}")
    kind, body, fields, tag = kept
    if any(name == b"if-none-match" and tag in value for name, value in headers):
        return OpenPage(304, kind, b"", fields, is_kept=False)
    return OpenPage(200, kind, body, fields, is_kept=True)


def login_page(next_path: str, refused: str = "", prefix: str = "") -> bytes:
    """The page to sign in, which then leads to `next_path`; with `refused`, the reason why a token was refused.
    `prefix`: the path that a proxy removes."""
    text = under(prefix, _login_page(bool(refused))) if prefix else _login_page(bool(refused))
    text = text.replace(NEXT, escape(next_path))
    return (text.replace(REFUSED, escape(refused)) if refused else text).encode()


@cache
def _login_page(is_refused: bool) -> str:
    return rendered("login.html", "/login", "", {}, title="Sign in", next=NEXT, refused=REFUSED if is_refused else "")


def own_path(text: str) -> str:
    """`text` if it is a path of this server, with a plain query or without; else `/`, so that signing in never
    redirects to another site."""
    for target in (text, text.partition("?")[0]):
        if len(target) <= PATH_CHARACTERS and _OWN_PATH.match(target):
            return target
    return "/"


def _next_of(query: bytes) -> str:
    for field in query.split(b"&", 10):
        if field.startswith(b"next="):
            return unquote_to_bytes(field[5:].replace(b"+", b" ")).decode("latin-1")
    return ""


@cache
def _files() -> dict[str, tuple[str, bytes, bytes, bytes]]:
    """By path: kind, content, header lines and the tag of a file's version."""
    files = {}
    for file in (HERE / "static").iterdir():
        body = file.read_bytes()
        kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
        tag = b'"' + hashlib.sha256(body).hexdigest()[:32].encode() + b'"'
        text_kind = f"{kind}; charset=utf-8" if kind.startswith("text/") else kind
        fields = b"etag: %b\r\nx-content-type-options: nosniff\r\n" % tag
        files[f"/static/{file.name}"] = (text_kind, body, fields, tag)
    return files
