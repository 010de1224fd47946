"""The right that each admin route needs, as dependencies of FastAPI."""

from __future__ import annotations

from fastapi import Request

from notify.server.access.principal import Principal


def check_admin(request: Request) -> None:
    """Reading needs the right `view`, a write `admin` for the topic or group in its path. Raises Forbidden."""
    principal: Principal = request.state.principal
    if request.method in ("GET", "HEAD"):
        principal.check("view")
    else:
        _check_write(principal, request)


def check_subscriber(request: Request) -> None:
    """A consumer may change its group's subscription; others need `admin` for group and topic. Raises Forbidden."""
    principal: Principal = request.state.principal
    if not principal.may("consume", request.path_params["name"], request.path_params["topic"]):
        _check_write(principal, request)


def check_topic_reader(request: Request) -> None:
    """A principal that may read a topic may also see its queues; others need `view`. Raises Forbidden."""
    principal: Principal = request.state.principal
    if not principal.may("read", request.path_params["name"]):
        principal.check("view")


def _check_write(principal: Principal, request: Request) -> None:
    names = {request.path_params[name] for name in ("name", "topic") if name in request.path_params}
    principal.check_write(request.scope["path"].removeprefix("/v1/admin/"), names)
