"""Pages of other sites get nothing from a server, and no header of a browser makes it fail."""

from __future__ import annotations

import sys

import pytest

from notify.errors import Forbidden
from notify.server.access.browsers import refuse_foreign_pages
from notify.server.access.guard import token_of_cookie
from notify.server.settings import Settings

OFF, ON = Settings(), Settings(access=True)
OWN = ("127.0.0.1:7400", "localhost:7400", "localhost", "[::1]:7400", "[::1]", "a.localhost:7400", "192.0.2.7:1", "")
FOREIGN = ("evil.example:7400", "evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "[", "[::1", "a:b")


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_while_access_is_off_only_own_names_are_served(method: str) -> None:
    """A page whose name was made to point at this machine sends neither Origin nor Sec-Fetch-Site."""
    for host in OWN:
        refuse_foreign_pages(method, [(b"host", host.encode())], OFF)
    for host in FOREIGN:
        with pytest.raises(Forbidden):
            refuse_foreign_pages(method, [(b"host", host.encode())], OFF)
        refuse_foreign_pages(
            method, [(b"host", host.encode())], ON
        )  # with access on a token protects the server, under any name
    refuse_foreign_pages(method, [(b"host", b"notify.example")], Settings(url="https://notify.example"))
    with pytest.raises(Forbidden):
        refuse_foreign_pages(method, [(b"host", b"notify.example:81")], Settings(url="https://notify.example"))


@pytest.mark.parametrize(
    "origin", ["http://[", "null", "", "http://", "x", "http://[::1", "http://evil.example\uff1a80"]
)
def test_no_origin_makes_the_server_fail(origin: str) -> None:
    headers = [(b"host", b"localhost:7400"), (b"origin", origin.encode("utf-8"))]
    if not origin:
        refuse_foreign_pages("POST", headers, ON)
        return
    with pytest.raises(Forbidden):
        refuse_foreign_pages("POST", headers, ON)


def test_a_token_is_taken_from_a_cookie() -> None:
    assert token_of_cookie(b"notify_token=nt_1_abc") == b"Bearer nt_1_abc"
    assert token_of_cookie(b'a=b; notify_token = nt_1_abc ;c="d;e"') == b"Bearer nt_1_abc"
    assert token_of_cookie(b"") == token_of_cookie(b"other_notify_token=x; notify_tokens=y; a") == b""


def test_a_cookie_costs_what_it_is_long() -> None:
    """The work for a cookie grows with its length. Three of 62 kB held the server for 69 s: Python's unquoting was
    quadratic (CVE-2024-7592).

    The test counts calls of functions, not seconds: the server leaves quoted pairs as they are.
    """
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    for header in (b'notify_token="' + b"\\" * 62_000 + b'"', b"notify_token=" + b'"\\134' * 15_000):
        calls = 0
        sys.setprofile(count)
        try:
            token_of_cookie(header)
        finally:
            sys.setprofile(None)
        assert calls < 100
