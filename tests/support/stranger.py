"""Something between a client and a server that answers in the server's place, as proxies and login pages do."""

from __future__ import annotations

import contextlib
import gzip
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit


def page(status: str, kind: str = "text/html", body: bytes = b"", *fields: str) -> bytes:
    """An answer as a proxy gives it."""
    text = body or b"<html>\r\n<head><title>%b</title></head><body>nginx</body></html>" % status.encode()
    lines = [f"HTTP/1.1 {status}", "Server: nginx/1.22.1", f"Content-Type: {kind}", f"Content-Length: {len(text)}"]
    return "\r\n".join([*lines, *fields, "", ""]).encode() + text


ENVOY = b"upstream connect error or disconnect/reset before headers. reset reason: connection termination"
LOGIN = (
    b"<!DOCTYPE html><html><head><title>Sign in</title><script>var a = 1;</script></head><body>Sign in</body></html>"
)
PROBLEM_OF_ANOTHER = b'{"type":"about:blank","title":"Not Found","status":404,"detail":"no route","code":"not_found"}'
PAGES = {
    "404": page("404 Not Found"),
    "404 of an ingress": page("404 Not Found", "text/plain; charset=utf-8", b"default backend - 404"),
    "502": page("502 Bad Gateway", "text/html", b"", "Connection: close"),
    "503 of Envoy": page("503 Service Unavailable", "text/plain", ENVOY),
    "413": page("413 Request Entity Too Large", "text/html", b"", "Connection: close"),
    "400": page("400 Bad Request", "text/html", b"", "Connection: close"),
    "403": page("403 Forbidden"),
    "409": page("409 Conflict"),
    "410": page("410 Gone"),
    "422": page("422 Unprocessable Content"),
    "429": page("429 Too Many Requests", "text/html", b"", "Retry-After: 1"),
    "401": page("401 Unauthorized", "text/html", b"", 'WWW-Authenticate: Basic realm="office"'),
    "407": page("407 Proxy Authentication Required"),
    "301": page("301 Moved Permanently", "text/html", b"", "Location: https://login.example/"),
    "302": page("302 Found", "text/html", b"", "Location: https://login.example/"),
    "308": page("308 Permanent Redirect", "text/html", b"", "Location: https://login.example/"),
    "421": page("421 Misdirected Request"),
    "426": page("426 Upgrade Required", "text/plain", b"upgrade", "Upgrade: h2c", "Connection: upgrade"),
    "431": page("431 Request Header Fields Too Large"),
    "464": page("464 Incompatible Protocol"),
    "500": page("500 Internal Server Error"),
    "507": page("507 Insufficient Storage"),
    "520": page("520 Web Server Returned an Unknown Error"),
    "204": b"HTTP/1.1 204 No Content\r\nServer: portal\r\n\r\n",
    "304": b"HTTP/1.1 304 Not Modified\r\nServer: cache\r\n\r\n",
    "200 with a login page": page("200 OK", "text/html", LOGIN),
    "200 with JSON": page("200 OK", "application/json", b'{"status":"UP"}'),
    "200 with a list": page("200 OK", "application/json", b"[1]"),
    "200 empty": b"HTTP/1.1 200 OK\r\nServer: x\r\nContent-Type: application/msgpack\r\nContent-Length: 0\r\n\r\n",
    "200 cut off": page("200 OK", "application/msgpack", b"\x81\xa5items\x91\x84\xa2id"),
    "200 zipped": page("200 OK", "application/msgpack", gzip.compress(b"\x81\xa5items\x90"), "Content-Encoding: gzip"),
    "a problem of another program": page("404 Not Found", "application/problem+json", PROBLEM_OF_ANOTHER),
    "without a length": b"HTTP/1.0 503 Service Unavailable\r\nContent-Type: text/html\r\n\r\n<html>HAProxy</html>",
    "101": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n",
    "not HTTP": b"SSH-2.0-OpenSSH_9.2\r\n",
    "nothing": b"",
}
"""The answers of strangers, by a name."""
FEW = ("404 of an ingress", "502", "413", "400", "401", "302", "426", "200 with a login page", "200 cut off", "nothing")
"""Names of answers of each kind, for tests that are dear."""


class Stranger:
    """Passes requests on to a server, and answers some itself: those whose request line matches `instead_of`, and whose
    body has at least `from_bytes`, with `answer`, which ends the connection if it is empty; the first `times`, or all
    with None."""

    def __init__(self, url: str) -> None:
        target = urlsplit(url)
        self._target = target.hostname or "", target.port or 80
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._rule: tuple[re.Pattern[str], bytes, int] | None = None
        self._times: int | None = 0
        self._changing = threading.Lock()
        self.given = 0
        """How many answers it has given."""
        self.sizes: list[int] = []
        """The sizes of the bodies that it has passed on to routes that it answers for."""
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def answer(self, answer: bytes, instead_of: str = "", *, times: int | None = 1, from_bytes: int = 0) -> None:
        """Set what is answered from now on."""
        with self._changing:
            self._rule, self._times, self.given = (re.compile(instead_of), answer, from_bytes), times, 0

    def stop(self) -> None:
        """Answer nothing any more."""
        with self._changing:
            self._rule, self._times = None, 0

    @property
    def is_done(self) -> bool:
        """Whether it has given all answers."""
        return self._times == 0

    def _answer_to(self, line: str, size: int) -> bytes | None:
        with self._changing:
            if self._rule is None or self._rule[0].search(line) is None:
                return None
            if self._times == 0 or size < self._rule[2]:
                self.sizes.append(size)
                return None
            if self._times is not None:
                self._times -= 1
            self.given += 1
            return self._rule[1]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                self._open.add(client)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        upstream: socket.socket | None = None
        try:
            reading = client.makefile("rb")
            while (head := _head(reading)) is not None:
                size = _length(head)
                body = reading.read(size)
                line = head.partition(b"\r\n")[0].decode("latin-1")
                answer = self._answer_to(line, size)
                if answer is None:
                    if upstream is None:
                        upstream = socket.create_connection(self._target)
                        self._open.add(upstream)
                        replies = upstream.makefile("rb")
                    upstream.sendall(head + body)
                    answer_head = _head(replies)
                    if answer_head is None:
                        return
                    client.sendall(answer_head + replies.read(_length(answer_head)))
                    if b"connection: close" in answer_head.lower():
                        return
                    continue
                client.sendall(answer)
                lower = answer.lower()
                if b"content-length" not in lower or b"connection: close" in lower:
                    return
        except OSError:
            return
        finally:
            for each in (client, upstream):
                if each is not None:
                    self._open.discard(each)
                    with contextlib.suppress(OSError):
                        each.shutdown(socket.SHUT_RDWR)
                    each.close()

    def close(self) -> None:
        for each in (self._listening, *list(self._open)):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def _head(reading: object) -> bytes | None:
    lines = []
    readline: Callable[[], bytes] = reading.readline  # type: ignore[attr-defined]
    while line := readline():
        lines.append(line)
        if line == b"\r\n":
            return b"".join(lines)
    return None


def _length(head: bytes) -> int:
    found = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    return int(found[1]) if found else 0


@contextmanager
def stranger(url: str) -> Iterator[Stranger]:
    """A Stranger before a server."""
    between = Stranger(url)
    try:
        yield between
    finally:
        between.close()
