"""URLs that users give: the address of a server, and any URL as errors and logs may show it, without its secrets."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, urlsplit

from notify.errors import InvalidRequest

HIDDEN = "***"
_PASSWORD = re.compile(
    r"(://[^/?#@:\s]*:)"
    # SQLAlchemy takes a password with slashes, and people forget to encode an @.
    r"(?:(?!://)[^\s@])*(?:@[^\s@/?#,]*)*?@(?![^\s@/?#,]*@)"
)
_USER = re.compile(r"(\bhttps?://)[^/?#\s]*@", re.IGNORECASE)
_SECRET = re.compile(
    r"([?&;][^=&;\s]*(?:password|passwd|secret|token|key\.pem|oauthbearer\.config)[^=&;\s]*=)[^&;\s]*", re.IGNORECASE
)
_WITH_USER = re.compile(r"\s*https?://[^?#]*@", re.IGNORECASE)
_PLACE = re.compile(r"\s*(?:[a-z][a-z0-9+.-]*:)?(?:[/\\]{2})?[^/\\?#\s]*", re.IGNORECASE)


def without_secrets(text: str) -> str:
    """The text with *** in place of passwords in URLs, of the user in an address of HTTP, which may be a token, and of
    settings in a URL that may be secret."""
    text = _PASSWORD.sub(rf"\1{HIDDEN}@", text)
    return _SECRET.sub(rf"\1{HIDDEN}", _USER.sub(rf"\1{HIDDEN}@", text))


def place_of(address: str) -> str:
    """Scheme, host and port of a webhook's address: its path and query may be what lets a caller in."""
    shown = without_secrets(address)
    place = _PLACE.match(shown)
    end = 0 if place is None else place.end()
    return shown if shown[end:] in ("", "/") else f"{shown[:end]}/{HIDDEN}"


def has_user(url: str) -> bool:
    """Whether this is an address of HTTP with a user or a password."""
    return bool(_WITH_USER.match(url))


def refuse_user(url: str) -> None:
    """Raises InvalidRequest for addresses of a server with a user or a password, which would be shown to nobody."""
    if has_user(url):
        raise InvalidRequest(
            f"{without_secrets(url)!r} is not a server's address: it has a user or a password. A client shows a token: "
            "give token=, or set NOTIFY_TOKEN"
        )


def server_address(url: str) -> SplitResult:
    """The parts of a server's address. Raises InvalidRequest for what is none."""
    refuse_user(url)
    shown = without_secrets(url)
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - it is looked at here, and raises for what is no port
    except ValueError as error:
        raise InvalidRequest(f"{shown!r} is not a server's address: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        of_kafka = "; only consumers, bridges and relays reach Kafka themselves" if parts.scheme == "kafka" else ""
        raise InvalidRequest(f"{shown!r} is not a server's address; it should read http://host:port{of_kafka}")
    return parts
