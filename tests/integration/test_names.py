"""Names in a request are validated before rights are asked, and before anything is made with them."""

from __future__ import annotations

from typing import Any

import pytest

from notify.protocol.limits import LIMITS
from notify.testing import InMemoryServer
from tests.support.http import admin, ask
from tests.support.servers import GuardedInMemory

WRONG = ("x" * 128, ".x", "x y", "x" * 1_000_000)


def polled(names: dict[str, Any]) -> dict[str, Any]:
    return {"instance": "i", "wait": 0, "max": 1, **names}


@pytest.mark.parametrize("name", WRONG)
def test_an_invalid_name_is_refused_before_rights_are_checked(name: str) -> None:
    with GuardedInMemory() as server:
        token = server.make("consume:points", "check:shop", "read:t", "bridge:db")
        bodies = [
            ("/v1/checks/poll", polled({"producer_group": name})),
            ("/v1/transactions/states", {"producer_group": name, "ids": []}),
            ("/v1/transactions/outcomes", {"producer_group": name, "outcomes": []}),
            ("/v1/groups/points/receive", polled({"topics": [name], "lease": 30})),
        ]
        if len(name) < 1000:  # the head's bound holds for names in a path
            path = name.replace(" ", "%20")
            bodies += [
                (f"/v1/groups/{path}/receive", polled({"topics": ["t"], "lease": 30})),
                (f"/v1/groups/{path}/settle", {"items": []}),
            ]
            for route in (f"/v1/topics/{path}/queues/0/messages", f"/v1/bridge/{path}"):
                status, problem = ask(server.url, "GET", route, token=token)
                assert (status, problem["code"]) == (422, "invalid_name"), route
        for route, body in bodies:
            status, problem = ask(server.url, "POST", route, body, token)
            assert (status, problem["code"]) == (422, "invalid_name"), route


def test_a_receive_names_so_many_topics_and_makes_none_where_none_may_be_made() -> None:
    """Such a receive is refused, and so is a subscription. They made topics although first use may make none."""
    with InMemoryServer(create_topics=False) as server:
        admin(server.url, "PUT", "topics/there", {})

        def receive(*topics: str) -> tuple[int, str | None]:
            body = polled({"topics": list(topics), "lease": 30})
            status, answer = ask(server.url, "POST", "/v1/groups/g/receive", body)
            return status, answer.get("code")

        assert receive("there") == (200, None)
        assert receive("there", "other") == (404, "unknown_topic")
        path = "/v1/groups/g/subscriptions"
        status, problem = ask(server.url, "PUT", f"{path}/other", {})
        assert (status, problem["code"]) == (404, "unknown_topic"), "a consumer made the topic by its subscription"
        assert [ask(server.url, "PUT", f"{path}/{name}", {})[0] for name in ("there", "oth*")] == [200, 200]
        assert receive(*[f"t{n}" for n in range(LIMITS.topics + 1)]) == (422, "out_of_bounds")
        assert [t["name"] for t in admin(server.url, "GET", "topics")["topics"]] == ["there"]
    with InMemoryServer() as server:
        body = polled({"topics": ["t"] * (LIMITS.topics + 1), "lease": 30})
        status, problem = ask(server.url, "POST", "/v1/groups/g/receive", body)
        assert (status, problem["code"]) == (422, "out_of_bounds")
