"""URLs from users: checks the address of a server, and hides the secrets of any URL in errors and logs."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, urlsplit

from notify.errors import InvalidRequest

HIDDEN = "***"
_PASSWORD = re.compile(
    r"(://[^/?#@:\s]*:)"
    # SQLAlchemy accepts a password with slashes, and people forget to encode an @.
    r"(?:(?!://)[^\s@])*(?:@[^\s@/?#,]*)*?@(?![^\s@/?#,]*@)"
)
_USER = re.compile(r"(\bhttps?://)[^/?#\s]*@", re.IGNORECASE)
_SECRET = re.compile(
    r"([?&;][^=&;\s]*(?:password|passwd|secret|token|key\.pem|oauthbearer\.config)[^=&;\s]*=)[^&;\s]*", re.IGNORECASE
)
_WITH_USER = re.compile(r"\s*https?://[^?#]*@", re.IGNORECASE)
_PLACE = re.compile(r"\s*(?:[a-z][a-z0-9+.-]*:)?(?:[/\\]{2})?[^/\\?#\s]*", re.IGNORECASE)


def without_secrets(text: str) -> str:
    """The text with *** instead of the secrets in URLs: passwords, the user in an HTTP address (which may be a token),
    and parameters that may be secret."""
    text = _PASSWORD.sub(rf"\1{HIDDEN}@", text)
    return _SECRET.sub(rf"\1{HIDDEN}", _USER.sub(rf"\1{HIDDEN}@", text))


def place_of(address: str) -> str:
    """Scheme, host and port of a webhook's address; its path and query are hidden, because they may be secret."""
    safe_address = without_secrets(address)
    place = _PLACE.match(safe_address)
    end = 0 if place is None else place.end()
    return safe_address if safe_address[end:] in ("", "/") else f"{safe_address[:end]}/{HIDDEN}"


def has_user(url: str) -> bool:
    """Whether this is an HTTP address with a user or a password."""
    return bool(_WITH_USER.match(url))


def refuse_user(url: str) -> None:
    """Raises InvalidRequest for a server's address with a user or a password, which no client would send."""
    if has_user(url):
        raise InvalidRequest(
            f"{without_secrets(url)!r} is not a server's address: it has a user or a password. A client sends a token: "
            "give token=, or set NOTIFY_TOKEN"
        )


def check_host(name: str | None) -> None:
    """Raises ValueError for a name of a host that no resolver takes: connecting would raise UnicodeError."""
    try:
        (name or "").encode("idna")
    except UnicodeError:
        raise ValueError(f"{name!r} is not a valid host name: each label has 1 to 63 characters") from None


def server_address(url: str) -> SplitResult:
    """The parts of a server's address. Raises InvalidRequest if `url` is not one."""
    refuse_user(url)
    safe_url = without_secrets(url)
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - the property raises ValueError for an invalid port
        check_host(parts.hostname)
    except ValueError as error:
        raise InvalidRequest(f"{safe_url!r} is not a server's address: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        hint = "; only consumers, bridges and relays reach Kafka themselves" if parts.scheme == "kafka" else ""
        raise InvalidRequest(f"{safe_url!r} is not a server's address; it should read http://host:port{hint}")
    if parts.query or parts.fragment:
        raise InvalidRequest(
            f"{safe_url!r} is not a server's address: leave out what follows {'?' if parts.query else '#'}"
        )
    return parts


def text_of_missing(method: str, path: str) -> str:
    """The text for a path that a server does not have; it names what a client may have put before the path."""
    before = path[: max(path.rfind("/v1/"), 0)]
    hint = f": leave {before[:60]!r} out of the server's address, or have the proxy remove it" if before else ""
    return f"there is no {method} {path[:100]}{hint}"
