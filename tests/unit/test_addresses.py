"""`GET /v1/members` of a server that listens on all addresses names it as it was asked."""

from __future__ import annotations

from typing import Any

import pytest

from notify.server.data.routes import reached


def members(*urls: str, **more: Any) -> dict[str, Any]:
    return {"version": 1, "members": [{"name": f"worker-{n}", "url": url} for n, url in enumerate(urls, 1)], **more}


@pytest.mark.parametrize(
    ("announced", "host", "told"),
    [
        ("http://0.0.0.0:7400/worker-1", "notify.example:8400", "http://notify.example:8400/worker-1"),
        ("http://[::]:7400/worker-1", "[2001:db8::1]:7400", "http://[2001:db8::1]:7400/worker-1"),
        ("https://0.0.0.0:7401/worker-2", "notify.example:7400", "https://notify.example:7401/worker-2"),
        ("https://0.0.0.0:7401/worker-2", "notify.example", "https://notify.example:7401/worker-2"),
        ("https://[::]:7401/worker-2", "[2001:db8::1]", "https://[2001:db8::1]:7401/worker-2"),
        ("http://10.0.0.7:7400/worker-1", "notify.example:8400", "http://10.0.0.7:7400/worker-1"),
        ("http://0.0.0.0:7400/worker-1", "", "http://0.0.0.0:7400/worker-1"),
    ],
)
def test_all_addresses_are_the_one_that_was_asked(announced: str, host: str, told: str) -> None:
    (member,) = reached(members(announced, keys=["worker-1"]), host)["members"]
    assert member["url"] == told


def test_one_server_alone_too_and_no_member_of_a_registry() -> None:
    alone = members("http://0.0.0.0:7400") | {"version": 0}
    assert reached(alone, "notify.example")["members"][0]["url"] == "http://notify.example"
    others = members("http://0.0.0.0:7400")
    assert reached(others, "notify.example") == others
