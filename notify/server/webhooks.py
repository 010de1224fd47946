"""Requests that the server makes itself: to addresses on an allow-list only, signed, timestamped, never redirected.

The signature is `Notify-Signature: t=SECONDS,v1=HEX`, where HEX is the HMAC-SHA-256 of `SECONDS.BODY` under the
setting `webhook_secret`. A receiver compares it in constant time and refuses what is older than a few minutes.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import http.client
import ssl
import time
from urllib.parse import urlsplit

from notify.errors import InvalidRequest, Unavailable
from notify.settings import Settings

SECONDS = 10.0
ANSWER_BYTES = 1 << 20


def check_address(url: str, settings: Settings) -> None:
    """Raises InvalidRequest for an address that is not on the allow-list, or not one at all."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.username is not None:
        raise InvalidRequest(f"{url[:200]!r} is not an address of a webhook", "invalid_webhook")
    place = f"{parts.hostname}:{port or (443 if parts.scheme == 'https' else 80)}"
    allowed = [part.strip() for part in settings.webhook_hosts.split(",") if part.strip()]
    if place not in allowed:
        raise InvalidRequest(
            f"{place} is not on the allow-list: start the servers with NOTIFY_WEBHOOK_HOSTS={place}", "invalid_webhook"
        )
    if not settings.webhook_secret:
        raise InvalidRequest("webhooks are signed: give the servers NOTIFY_WEBHOOK_SECRET", "invalid_webhook")


def signature(secret: str, at: int, body: bytes) -> str:
    """The value of the header for a body that is sent at this second."""
    proof = hmac.new(secret.encode(), b"%d." % at + body, hashlib.sha256).hexdigest()
    return f"t={at},v1={proof}"


async def post(url: str, body: bytes, settings: Settings) -> bytes:
    """Send JSON; the answer's body. Raises InvalidRequest for a bad address, Unavailable for anything but a 200."""
    check_address(url, settings)
    try:
        return await asyncio.wait_for(asyncio.to_thread(_post, url, body, settings.webhook_secret), 2 * SECONDS)
    except TimeoutError:
        raise Unavailable(f"webhook {url}: no answer within {SECONDS:g} s") from None


def _post(url: str, body: bytes, secret: str) -> bytes:
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        context = ssl.create_default_context()
        connection = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=SECONDS, context=context)
    else:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=SECONDS)
    headers = {
        "content-type": "application/json",
        "user-agent": "notify",
        "notify-signature": signature(secret, int(time.time()), body),
    }
    try:
        connection.request("POST", (parts.path or "/") + (f"?{parts.query}" if parts.query else ""), body, headers)
        answer = connection.getresponse()
        found = answer.read(ANSWER_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:
        raise Unavailable(f"webhook {url}: {error or type(error).__name__}") from None
    finally:
        connection.close()
    if answer.status != 200 or len(found) > ANSWER_BYTES:
        raise Unavailable(f"webhook {url} answered {answer.status} and {len(found)} bytes; 200 is wanted")
    return found
