"""Requests that the server sends to webhooks: only to an allow-list, signed, timestamped, without redirects.

The signature is `Notify-Signature: t=SECONDS,v1=HEX`, where HEX is the HMAC-SHA-256 of `SECONDS.BODY` under the
setting `webhook_secret`. A receiver compares it in constant time and refuses requests older than a few minutes.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import socket
import ssl
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from urllib.parse import unquote, urlsplit

import httptools

from notify.errors import InvalidRequest, Unavailable
from notify.runtime.addresses import first_connection
from notify.runtime.threads import in_thread
from notify.runtime.urls import HIDDEN, check_host, place_of
from notify.server.settings import Settings

SECONDS = 10.0
"""The most time for a whole call, from the look-up of the name to the last byte of the answer."""
URL_CHARACTERS = 2000
ANSWER_BYTES = 1 << 20
HEAD_BYTES = 64 << 10
"""The most bytes of an answer's head."""
LOOKUP_THREADS = 8
"""Threads that only look up names: a look-up may hang for longer than a call, and nothing else may wait for it."""
FOUND_SECONDS = 30.0
"""How long the addresses of a name are used before it is looked up again."""
MOST_FOUND = 1000

_lookups = ThreadPoolExecutor(LOOKUP_THREADS, "notify-webhook")
_found: OrderedDict[tuple[str, int], tuple[float, Future[list[str]]]] = OrderedDict()
"""By (name, port): until when its addresses hold, and the look-up, which all calls share while it runs."""
_found_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Address:
    is_https: bool
    hostname: str
    port: int
    target: str
    """Path and query, as the request line has them."""


def _parsed(url: str) -> _Address:
    """The parts of a URL. Raises InvalidRequest if it is not the address of a webhook."""
    try:
        if len(url) > URL_CHARACTERS:  # `urlsplit` caches what it has split, and IDNA takes long for a long name
            raise ValueError
        parts = urlsplit(url)
        port = parts.port
        check_host(parts.hostname)
    except ValueError:
        parts, port = urlsplit(""), None
    is_plain = url.isascii() and url.isprintable() and " " not in url
    if not is_plain or parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise InvalidRequest(f"{place_of(url)[:200]!r} is not an address of a webhook", "invalid_webhook")
    is_https = parts.scheme == "https"
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return _Address(is_https, parts.hostname, port or (443 if is_https else 80), target)


def check_address(url: str, settings: Settings) -> None:
    """Raises InvalidRequest if a URL is not an address, or is not on the allow-list, or webhooks have no secret."""
    webhook = _parsed(url)
    host_and_port = f"{webhook.hostname}:{webhook.port}"
    allowed = [part.strip() for part in settings.webhook_hosts.split(",") if part.strip()]
    if host_and_port not in allowed:
        raise InvalidRequest(
            f"{host_and_port} is not on the allow-list: start the servers with it in NOTIFY_WEBHOOK_HOSTS, whose hosts "
            "are separated by commas",
            "invalid_webhook",
        )
    if not settings.webhook_secret:
        raise InvalidRequest("webhooks are signed: give the servers NOTIFY_WEBHOOK_SECRET", "invalid_webhook")


def signature(secret: str, at: int, body: bytes) -> str:
    """The value of the header for a body that is sent at the second `at` (since 1970)."""
    proof = hmac.new(secret.encode(), b"%d." % at + body, hashlib.sha256).hexdigest()
    return f"t={at},v1={proof}"


class Unreachable(Unavailable):
    """No connection to the receiver was made: it has not seen the request."""


async def send(url: str, body: bytes, settings: Settings) -> tuple[int, bytes]:
    """Send JSON; returns the answer's status and body.

    Raises InvalidRequest if the address is bad, Unreachable if there was no connection, and Unavailable if no complete
    answer came; the receiver may then have seen the request.
    """
    check_address(url, settings)
    to = _parsed(url)
    connected = False
    try:
        async with asyncio.timeout(SECONDS):
            reader, writer = await _connected(to)
            connected = True
            return await _asked(to, reader, writer, body, settings.webhook_secret)
    except TimeoutError:
        reason = f"no {'answer' if connected else 'connection'} within {SECONDS:g} s"
    except ssl.SSLError as error:
        reason = _tls_failure(error)
    except (OSError, httptools.HttpParserError, _NoAnswer) as error:
        reason = str(error) or type(error).__name__
    raise (Unavailable if connected else Unreachable)(f"webhook {place_of(url)}: {reason}")


def _tls_failure(error: ssl.SSLError) -> str:
    """A sentence for a failure of TLS, with the remedy."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if "mismatch" in error.verify_message:
            remedy = "give the address by a name that is in the certificate"
        elif "expired" in error.verify_message:
            remedy = "renew the certificate"
        else:
            remedy = "start the servers with SSL_CERT_FILE=FILE, which has the authority that signed the certificate"
        return f"{error.verify_message.rstrip('.')}: {remedy}"
    if error.reason == "WRONG_VERSION_NUMBER":
        return "it does not speak TLS there: is it an http:// address?"
    return str(error)


def said(url: str, answer: bytes, most: int) -> str:
    """At most `most` characters of a receiver's answer, without the address's path, which some receivers repeat."""
    text = answer.decode(errors="replace")
    target = _parsed(url).target
    for part in (target, target.partition("?")[0]):
        for variant in (part, unquote(part)):
            text = text.replace(variant, f"/{HIDDEN}") if variant != "/" else text
    return text[:most].strip()


async def post(url: str, body: bytes, settings: Settings) -> bytes:
    """Send JSON and return the answer's body. Raises InvalidRequest for a bad URL, Unavailable without a 200."""
    status, answer_body = await send(url, body, settings)
    if status != 200:
        raise Unavailable(f"webhook {place_of(url)} answered {status}, not 200")
    return answer_body


class _NoAnswer(Exception):
    """The receiver closed the connection, or sends too much."""


class _Answer:
    """The part of an answer that has come."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.body = bytearray()
        self.status = 0
        self.is_complete = False
        self.is_declared = False
        """Its head tells its length; otherwise the answer ends with the connection."""

    def add(self, part: bytes) -> None:
        """Parse the next bytes. Raises HttpParserError if they are not HTTP, _NoAnswer if they change the protocol."""
        try:
            self._parser.feed_data(part)
        except httptools.HttpParserUpgrade:
            raise _NoAnswer(f"it answered {self._parser.get_status_code()}, to speak another protocol") from None
        except httptools.HttpParserError:
            if not self.is_complete:  # bytes after the answer do not matter
                raise

    # The parser calls the following methods.

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self.is_declared = True

    def on_headers_complete(self) -> None:
        if not self.is_complete:
            self.status = self._parser.get_status_code()

    def on_body(self, part: bytes) -> None:
        if not self.is_complete:
            self.body += part

    def on_message_complete(self) -> None:
        if self.status >= 200:
            self.is_complete = True
        else:  # a status such as 103 comes before the answer
            self.status, self.is_declared = 0, False


async def _asked(
    to: _Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes, secret: str
) -> tuple[int, bytes]:
    """Send the request; returns the answer's status and body. A slow receiver occupies no thread."""
    try:
        host = f"[{to.hostname}]" if ":" in to.hostname else to.hostname
        head = (
            f"POST {to.target} HTTP/1.1",
            f"host: {host}:{to.port}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "user-agent: notify",
            f"notify-signature: {signature(secret, int(time.time()), body)}",
            "connection: close",
        )
        writer.write("\r\n".join((*head, "", "")).encode() + body)
        await writer.drain()
        answer = _Answer()
        size = 0
        while not answer.is_complete:
            part = await reader.read(HEAD_BYTES)
            if not part:
                if not answer.status or answer.is_declared:
                    raise _NoAnswer("it closed before its answer was complete")
                break
            answer.add(part)
            size += len(part)
            if len(answer.body) > ANSWER_BYTES or size > ANSWER_BYTES + HEAD_BYTES:
                raise _NoAnswer(f"its answer has more than {ANSWER_BYTES} bytes")
        return answer.status, bytes(answer.body)
    finally:
        writer.transport.abort()


def _look_up(hostname: str, port: int) -> Future[list[str]]:
    """The look-up of a name's addresses. Calls share it, so that a name server that hangs occupies one thread."""
    now = time.monotonic()
    with _found_lock:
        until, looking = _found.get((hostname, port), (0.0, None))
        if looking is not None and (not looking.done() or (now < until and looking.exception() is None)):
            return looking
        looking = Future()
        looking.set_running_or_notify_cancel()  # a call that is cancelled must not cancel the others' look-up
        _lookups.submit(_find, hostname, port, looking)
        _found[(hostname, port)] = (now + FOUND_SECONDS, looking)
        _found.move_to_end((hostname, port))
        while len(_found) > MOST_FOUND:
            _found.popitem(last=False)
    return looking


def _find(hostname: str, port: int, looking: Future[list[str]]) -> None:
    try:
        results = socket.getaddrinfo(hostname, port, type=socket.SOCK_STREAM)
        looking.set_result(list(dict.fromkeys(str(result[4][0]) for result in results)))
    except BaseException as error:
        looking.set_exception(error)


@cache
def _tls() -> ssl.SSLContext:
    """The TLS context, made once: reading the system's authorities takes tens of milliseconds of CPU."""
    return ssl.create_default_context()


async def _connected(to: _Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the first of the name's addresses that accepts one. Raises OSError."""
    addresses = await asyncio.wrap_future(_look_up(to.hostname, to.port))
    tls = await in_thread(_tls) if to.is_https else None

    async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(
            address, to.port, ssl=tls, server_hostname=to.hostname if to.is_https else None
        )

    return await first_connection(addresses, connect, lambda late: late[1].transport.abort())
