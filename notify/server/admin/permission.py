"""The right that each admin route needs, as dependencies of FastAPI."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import Request

from notify.server.access.principal import Principal


def check_admin(request: Request) -> None:
    """Reading needs the right `view`, a write `admin` for the topic or group in its path. Raises Forbidden."""
    principal: Principal = request.state.principal
    path = request.scope["path"]
    if request.method in ("GET", "HEAD"):
        principal.check("view")
    elif path.startswith(("/v1/admin/topics/", "/v1/admin/groups/")):
        _check_admin_of_named(principal, request.path_params)
    elif path.startswith(("/v1/admin/transactions/", "/v1/admin/jobs/")):
        principal.check_some("admin")  # the route checks the group once it has read the transaction or job
    else:
        principal.check("admin")


def check_subscriber(request: Request) -> None:
    """A consumer may change its group's subscription; others need `admin` for group and topic. Raises Forbidden."""
    principal: Principal = request.state.principal
    path_params = request.path_params
    if not principal.may("consume", path_params["name"], path_params["topic"]):
        _check_admin_of_named(principal, path_params)


def check_topic_reader(request: Request) -> None:
    """A principal that may read a topic may also see its queues; others need `view`. Raises Forbidden."""
    principal: Principal = request.state.principal
    if not principal.may("read", request.path_params["name"]):
        principal.check("view")


def _check_admin_of_named(principal: Principal, path_params: Mapping[str, str]) -> None:
    """Raises Forbidden without `admin` for all names in the path.

    A subscription needs the right for both its group and its topic, because it keeps the topic's messages.
    """
    for name in {path_params["name"], path_params.get("topic", path_params["name"])}:
        principal.check("admin", name)
