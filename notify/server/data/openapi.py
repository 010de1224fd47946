"""The data routes in the OpenAPI document: their schemas come from notify/protocol/wire.py, so that they cannot drift
apart."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from notify.protocol import wire

SUBSCRIPTION = "/v1/groups/{group}/subscriptions/{topic}"
SCHEDULE = "/v1/schedules/{schedule}"
REFUSED = "/v1/sources/{source}/refused"
ROUTES: list[tuple[str, str, type, type | None]] = [
    ("/v1/transactions", "Store halves", wire.JsonTransactions, wire.Items),
    ("/v1/transactions/outcomes", "Record outcomes, answer checks", wire.Outcomes, wire.Items),
    ("/v1/transactions/states", "The states of transactions", wire.States, wire.Items),
    ("/v1/transactions/left-behind", "Report what a group has left behind", wire.LeftBehindReport, None),
    ("/v1/checks/poll", "Wait for checks", wire.Poll, None),
    ("/v1/messages", "Send messages without a transaction", wire.JsonMessages, wire.Items),
    (SCHEDULE, "Declare a schedule, which sends a message repeatedly", wire.JsonSchedule, wire.ScheduleDeclared),
    ("/v1/groups/{group}/receive", "Receive messages under leases", wire.Receive, None),
    ("/v1/bridge/{source}/batches", "Append a bridge's transactions and position", wire.JsonBridgeBatch, wire.Bridged),
    (REFUSED, "Report how many refused transactions of a source wait for a decision", wire.RefusedReport, None),
    ("/v1/groups/{group}/settle", "Settle receipts", wire.Settle, wire.SettledItems),
    ("/v1/groups/{group}/leave", "An instance stops: give up what it has to itself", wire.Leave, None),
    (SUBSCRIPTION, "Make or change a subscription, or with * a pattern of topics", wire.Subscribe, None),
    (SUBSCRIPTION + "/inbox", "Report since when the group's inbox is complete", wire.WholeInbox, None),
]
METHODS = dict.fromkeys((SUBSCRIPTION, SUBSCRIPTION + "/inbox", REFUSED, SCHEDULE), "put")
"""The methods of routes whose method is not POST."""


_ID = "01912d68-783e-7a03-8467-5661c1243ad4"
EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/transactions": {
        "producer_group": "shop",
        "source": "shop-db",
        "instance": "shop-1",
        "transactions": [
            {"id": _ID, "messages": [{"topic": "order.placed", "key": "7", "tag": "vip", "body": '{"item": "book"}'}]}
        ],
    },
    "/v1/transactions/outcomes": {"producer_group": "shop", "outcomes": [{"id": _ID, "outcome": "COMMIT"}]},
    "/v1/transactions/states": {"producer_group": "shop", "ids": [_ID]},
    "/v1/transactions/left-behind": {"producer_group": "shop", "source": "shop-db", "transactions": 3, "seconds": 90},
    "/v1/checks/poll": {"producer_group": "shop", "instance": "shop-1", "wait": 20, "max": 100},
    "/v1/messages": {"messages": [{"topic": "order.placed", "body": "a book", "delay": 60}]},
    SCHEDULE: {"message": {"topic": "report.wanted", "body": "daily"}, "cron": "0 7 * * 1-5", "zone": "Europe/Berlin"},
    "/v1/groups/{group}/receive": {
        "instance": "points-1", "topics": ["order.placed"], "max": 100, "wait": 20, "lease": 30,
    },
    "/v1/groups/{group}/settle": {
        "items": [
            {"receipt": "12-0", "action": "ack"},
            {"receipt": "12-1", "action": "retry", "delay": 5, "reason": "the mailer is unreachable"},
        ]
    },
    "/v1/groups/{group}/leave": {"instance": "points-1"},
    SUBSCRIPTION: {"mode": "ordered", "start": "earliest", "tags": ["vip"], "max_attempts": 5, "retry_min": 2},
    SUBSCRIPTION + "/inbox": {"whole_from": "2026-11-01T00:00:00Z"},
    REFUSED: {
        "waiting": 1,
        "transactions": [{"id": _ID, "topic": "order.placed", "code": "too_large", "detail": "the body is too long"}],
    },
    "/v1/bridge/{source}/batches": {
        "epoch": 1,
        "expected_position": "0-1-41",
        "position": "0-1-42",
        "transactions": [
            {"id": _ID, "producer_group": "shop", "messages": [{"topic": "order.placed", "body": "a book"}]}
        ],
    },
}  # fmt: skip
"""A request to each data route."""


def describe_data_routes(api: FastAPI) -> None:
    """Make `api.openapi()` include the routes that FastAPI does not serve itself."""

    def openapi() -> dict[str, Any]:
        if api.openapi_schema is None:
            document = get_openapi(title=api.title, version=api.version, routes=api.routes)
            _add(document)
            api.openapi_schema = document
        return api.openapi_schema

    api.openapi = openapi  # type: ignore[method-assign]


_REFUSED = {
    "description": "An RFC 9457 problem with a stable code",
    "content": {wire.PROBLEM: {"schema": {"$ref": "#/components/schemas/Problem"}}},
}


def _add(document: dict[str, Any]) -> None:
    types = [request for _, _, request, _ in ROUTES] + [
        wire.Items,
        wire.SettledItems,
        wire.Bridged,
        wire.ScheduleDeclared,
        wire.ScheduleDeleted,
        wire.Problem,
    ]
    _, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    document.setdefault("components", {}).setdefault("schemas", {}).update(components)
    for path, summary, request, answer in ROUTES:
        schema = {"$ref": f"#/components/schemas/{answer.__name__}"} if answer is not None else {"type": "object"}
        body = {"schema": {"$ref": f"#/components/schemas/{request.__name__}"}, "example": EXAMPLES[path]}
        operation: dict[str, Any] = {
            "summary": summary,
            "tags": ["data"],
            "requestBody": {"required": True, "content": {wire.JSON: body}},
            "responses": {
                "200": {
                    "description": "Carried out" if path in METHODS else "Answered item by item",
                    "content": {wire.JSON: {"schema": schema}},
                },
                "4XX": _REFUSED,
                "503": _REFUSED,
                "507": _REFUSED,
            },
        }
        names = [name for name in ("group", "source", "topic", "schedule") if f"{{{name}}}" in path]
        if names:
            operation["parameters"] = [_named(name) for name in names]
        document["paths"][path] = {METHODS.get(path, "post"): operation}
    deleted = {"$ref": "#/components/schemas/ScheduleDeleted"}
    document["paths"][SCHEDULE]["delete"] = {
        "summary": "Delete a schedule",
        "tags": ["data"],
        "parameters": [_named("schedule")],
        "responses": {
            "200": {"description": "Whether there was one", "content": {wire.JSON: {"schema": deleted}}},
            "4XX": _REFUSED,
            "503": _REFUSED,
        },
    }
    plain = {"200": {"description": "As shown", "content": {wire.JSON: {"schema": {"type": "object"}}}}}
    for path, summary, parameters in (
        ("/v1/bridge/{source}", "Where a bridge's source stands", [_named("source")]),
        ("/v1/members", "Who is there: servers, bridges, relays, consumers", []),
        ("/v1/topics/{topic}", "A topic: its queues with the offsets they hold, and its policy", [_named("topic")]),
        ("/v1/withdrawals/{id}", "What became of a message that cancels or replaces a delayed one", [_named("id")]),
        ("/v1/limits", "The bounds of what clients send, and the rates that concern who asks", []),
    ):
        document["paths"][path] = {
            "get": {
                "summary": summary,
                "tags": ["data"],
                "parameters": parameters,
                "responses": plain | {"4XX": _REFUSED, "503": _REFUSED},
            }
        }
    document["paths"]["/v1/topics/{topic}/queues/{queue}/messages"] = {
        "get": {
            "summary": "Pull with offsets of the caller's own",
            "tags": ["data"],
            "parameters": [
                {"name": "topic", "in": "path", "required": True, "schema": {"type": "string", "maxLength": 127}},
                {"name": "queue", "in": "path", "required": True, "schema": {"type": "integer", "minimum": 0}},
                {"name": "offset", "in": "query", "schema": {"type": "integer", "minimum": 0}},
                {"name": "max", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 10_000}},
            ],
            "responses": {
                "200": {"description": "Messages", "content": {wire.JSON: {"schema": {"type": "object"}}}},
                "4XX": _REFUSED,
                "503": _REFUSED,
            },
        }
    }


def _named(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "maxLength": 127}}
