"""Rights: what a role needs (notify/kafka/rights.py), and what the brokers say that this user has of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from confluent_kafka import KafkaException, TopicCollection

from notify.cli.kafka.line import Line
from notify.cli.kafka.seen import Seen
from notify.errors import InvalidRequest
from notify.kafka import rights
from notify.kafka.rights import GROUP, TOPIC, Need, Needs, user_of
from notify.limits import check_name

ROLES: Mapping[str, Callable[[str, list[str]], Needs]] = {
    "bridge": rights.of_bridge,
    "consumer": rights.of_consumer,
    "server": lambda _name, _topics: rights.of_server(),
    "audit": lambda _name, _topics: rights.of_audit(),
}
NAMELESS = ("server", "audit")
ASK_SECONDS = 10.0


def needs_of(role: str, topics: list[str]) -> Needs:
    """The needs of `bridge:SOURCE`, `consumer:GROUP`, `server` or `audit`. Raises InvalidRequest."""
    kind, _, name = role.partition(":")
    if kind not in ROLES or bool(name) == (kind in NAMELESS):
        raise InvalidRequest(f"--as is bridge:SOURCE, consumer:GROUP, server or audit, not {role[:60]!r}")
    if name:
        check_name("source" if kind == "bridge" else "group", name)
    return ROLES[kind](name, topics)


def lines(seen: Seen, needs: Needs) -> Iterator[Line]:
    """A line for each need. Names of topics and groups that do not exist, and transactional ids, are not looked at."""
    who = user_of(seen.cluster)
    for need in needs.needs:
        check = f"right of a {needs.role}"
        names = _names(seen, need)
        if need.kind not in (TOPIC, GROUP) or not names:
            why = "it is not there yet" if need.kind in (TOPIC, GROUP) else "Kafka's client cannot ask for it"
            yield Line(check, "unknown", f"{need} ({need.why}): {why}")
            continue
        try:
            lacks = sorted({operation for name in names for operation in _lacks(seen, need, name)})
        except (KafkaException, TimeoutError) as error:
            yield Line(check, "unknown", f"{need} ({need.why}): the brokers do not say: {error}")
            continue
        if lacks:
            yield Line(check, "fail", f"grant {who} {need._replace(operations=tuple(lacks))} ({need.why})")
        else:
            yield Line(check, "ok", f"{need} ({need.why})")


def _names(seen: Seen, need: Need) -> list[str]:
    beginning = need.name.removesuffix("*")
    if need.kind == GROUP:
        return [beginning] if beginning else []
    if need.name.endswith("*"):
        return [name for name in seen.topics if name.startswith(beginning)]
    # A topic that this user may not see looks as if it were missing: it is asked for by its name.
    return [need.name] if need.name in seen.topics or "Create" not in need.operations else []


def _lacks(seen: Seen, need: Need, name: str) -> list[str]:
    """The operations of a need that this user may not do."""
    admin = seen.cluster.admin()
    try:
        answer: Any
        if need.kind == TOPIC:
            answer = admin.describe_topics(
                TopicCollection([name]), include_authorized_operations=True, request_timeout=ASK_SECONDS
            )[name]
        else:
            answer = admin.describe_consumer_groups(
                [name], include_authorized_operations=True, request_timeout=ASK_SECONDS
            )[name]
        allowed = answer.result(ASK_SECONDS + 1).authorized_operations
    except KafkaException as raised:
        if raised.args[0].code() in rights.REFUSED:
            return list(need.operations)
        raise
    if allowed is None:
        return []
    known = {operation.name.replace("_", "").lower() for operation in allowed}
    return [operation for operation in need.operations if operation.lower() not in known]
