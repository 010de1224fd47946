"""A refused request leaves no cycle of objects, which only a full garbage collection would free.

The server collects seldom, by the number of objects: a few frames that refer to each other keep heads and bodies of any
size. 3 connections with cookies of 60 kB took 250 MiB of a server in 9 s.
"""

from __future__ import annotations

import gc
import http.client
import traceback
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from notify.errors import NotifyError
from notify.server.access import tokens
from notify.server.connections.cycle import DataCycle
from notify.server.connections.protocol import Protocol
from notify.testing import InMemoryServer
from tests.support.clock import eventually

JSON = {"content-type": "application/json"}
LARGE = "\\" * 50_000
REQUESTS: list[tuple[str, str, dict[str, str], str | None, int]] = [
    ("GET", "/livez", {"cookie": f'notify_token="{LARGE}"'}, None, 200),
    ("GET", "/livez", {"authorization": "Bearer x.y.z"}, None, 200),
    ("GET", "/livez", {"x-large": "y" * 70_000}, None, 431),
    ("GET", "/v1/admin/limits", {}, None, 401),
    ("GET", "/v1/admin/limits", {"cookie": f'notify_token="{LARGE}"'}, None, 401),
    ("POST", "/v1/messages", {"authorization": "Bearer x.y.z"}, "{}", 401),
    ("POST", "/v1/messages", {"authorization": f"Bearer {LARGE}"}, "{}", 401),
    ("POST", "/v1/messages", {"authorization": "Bearer UNKNOWN"}, "{}", 401),
    ("POST", "/v1/messages", {"authorization": "Bearer ADMIN"} | JSON, "{", 400),
    ("POST", "/v1/messages", {"authorization": "Bearer ADMIN"} | JSON, '{"messages":[{"topic":"a b"}]}', 200),
    ("PUT", "/v1/admin/groups/g/subscriptions/t", {"authorization": "Bearer ADMIN"} | JSON, "{" + LARGE, 422),
    ("PUT", "/v1/admin/groups/g/subscriptions/t", {"authorization": "Bearer ADMIN"} | JSON,
     '{"reason":"r","filter":"((("}', 422),
    ("GET", "/v1/admin/nothing", {"authorization": "Bearer ADMIN"}, None, 404),
    ("GET", "/nothing", {"authorization": "Bearer ADMIN", "accept": "text/html"}, None, 404),
    ("GET", "/", {"accept": "text/html"}, None, 303),
    ("BLAH", "/livez", {}, None, 400),
]  # fmt: skip
KEPT_BY_CYCLES = (
    Protocol, DataCycle, RequestResponseCycle, NotifyError, RequestValidationError, types.FrameType,
    types.TracebackType,
)  # fmt: skip
SERVERS_CODE = ("/notify/server/", "/storage/", "/uvicorn/", "/starlette/", "/fastapi/")


@pytest.fixture(scope="module")
def server() -> Iterator[InMemoryServer]:
    with InMemoryServer(access=True, oidc_issuer="http://127.0.0.1:9") as server:
        yield server


@pytest.fixture(scope="module")
def frozen() -> Iterator[None]:
    """Objects of other tests stay frozen between these: all modules of the suite take a collection a second."""
    yield
    gc.unfreeze()


@pytest.fixture
def without_collections(frozen: None) -> Iterator[None]:
    gc.collect()
    gc.freeze()  # objects of other tests are left out of each collection
    gc.disable()
    try:
        yield
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status"),
    REQUESTS,
    ids=[f"{r[0]} {r[1]} {r[4]} {n}" for n, r in enumerate(REQUESTS)],
)
def test_a_refused_request_leaves_no_garbage(
    server: InMemoryServer,
    without_collections: None,
    method: str,
    path: str,
    headers: dict[str, str],
    body: str | None,
    status: int,
) -> None:
    shown = dict(headers)
    if "authorization" in shown:
        unknown = tokens.new_token(tokens.new_id())[0]
        shown["authorization"] = shown["authorization"].replace("ADMIN", server.admin_token).replace("UNKNOWN", unknown)
    host, port = server.url.removeprefix("http://").split(":")
    for _ in range(3):
        connection = http.client.HTTPConnection(host, int(port), timeout=30)
        connection.request(method, path, headers=shown, body=body)
        with connection.getresponse() as answer:
            answer.read()
        connection.close()
        assert answer.status == status
    eventually(lambda: not server.open_connections(), "the connections to end")
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    left: Counter[str] = Counter(
        type(o).__name__ for o in gc.garbage if isinstance(o, KEPT_BY_CYCLES) and _is_of_the_server(o)
    )
    assert not left, _shown(left)


def _is_of_the_server(kept: object) -> bool:
    """False for what a thread that an earlier test left behind drops meanwhile: a client's failed request."""
    frames: list[types.FrameType] = []
    if isinstance(kept, types.FrameType):
        frames = [kept]
    elif isinstance(kept, types.TracebackType | BaseException):
        trace = kept.__traceback__ if isinstance(kept, BaseException) else kept
        frames = [frame for frame, _ in traceback.walk_tb(trace)]
    return not frames or any(part in frame.f_code.co_filename for frame in frames for part in SERVERS_CODE)


def _shown(left: Counter[str]) -> str:
    largest: Any = sorted((len(o) for o in gc.garbage if isinstance(o, bytes | str | bytearray)), reverse=True)[:3]
    return f"only a collection would free {dict(left)}; the largest texts have {largest} bytes"
