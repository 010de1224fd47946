"""Checks which of the rights that a role needs (notify/kafka/rights.py) this user has, according to the brokers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial

from confluent_kafka import KafkaException, TopicCollection

from notify.cli.kafka.line import Line
from notify.cli.kafka.seen import Seen
from notify.errors import InvalidRequest, Unavailable
from notify.kafka import rights
from notify.kafka.admin_process import AdminProcess
from notify.kafka.group_questions import operations_on
from notify.kafka.rights import GROUP, TOPIC, Need, Needs, user_of
from notify.protocol.limits import check_name

ROLES: Mapping[str, Callable[[str, list[str]], Needs]] = {
    "bridge": rights.of_bridge,
    "consumer": rights.of_consumer,
    "server": lambda _name, _topics: rights.of_server(),
    "audit": lambda _name, _topics: rights.of_audit(),
    "sweep": lambda _name, _topics: rights.of_sweep(),
}
NAMELESS = ("server", "audit", "sweep")
ASK_SECONDS = 10.0


def needs_of(role: str, topics: list[str]) -> Needs:
    """The needs of `bridge:SOURCE`, `consumer:GROUP`, `server`, `audit` or `sweep`. Raises InvalidRequest."""
    kind, _, name = role.partition(":")
    if kind not in ROLES or bool(name) == (kind in NAMELESS):
        raise InvalidRequest(f"--as is bridge:SOURCE, consumer:GROUP, server, audit or sweep, not {role[:60]!r}")
    if name:
        check_name("source" if kind == "bridge" else "group", name)
    return ROLES[kind](name, topics)


def lines(seen: Seen, needs: Needs) -> Iterator[Line]:
    """A line for each need. Topics and groups that do not exist, and transactional ids, are not checked."""
    with closing(AdminProcess(seen.cluster)) as asker:
        for need in needs.needs:
            yield _line(seen, asker, needs.role, need)


def _line(seen: Seen, asker: AdminProcess, role: str, need: Need) -> Line:
    check = f"right of the {role}"
    names = _names(seen, need)
    if need.kind not in (TOPIC, GROUP) or not names:
        can_be_asked = need.kind == TOPIC or (need.kind == GROUP and need.name != "*")
        why = "it is not there yet" if can_be_asked else "Kafka's client cannot ask for it"
        return Line(check, "unknown", f"{need} ({need.why}): {why}")
    try:
        lacks = sorted({operation for name in names for operation in _lacks(seen, asker, need, name)})
    except (KafkaException, TimeoutError, Unavailable) as error:
        return Line(check, "unknown", f"{need} ({need.why}): the brokers do not say: {error}")
    if lacks:
        missing_need = need._replace(operations=tuple(lacks))
        return Line(check, "fail", f"grant {user_of(seen.cluster)} {missing_need} ({need.why})")
    return Line(check, "ok", f"{need} ({need.why})")


def _names(seen: Seen, need: Need) -> list[str]:
    beginning = need.name.removesuffix("*")
    if need.kind == GROUP:
        return [beginning] if beginning else []
    if need.name.endswith("*"):
        return [name for name in seen.topics if name.startswith(beginning)]
    # A topic that this user may not see seems to be missing, so it is asked for by its name.
    return [need.name] if need.name in seen.topics or "Create" not in need.operations else []


def _lacks(seen: Seen, asker: AdminProcess, need: Need, name: str) -> list[str]:
    """The operations of a need that this user may not do."""
    try:
        allowed = _of_topic(seen, name) if need.kind == TOPIC else asker.ask(partial(operations_on, group=name))
    except KafkaException as raised:
        if raised.args[0].code() in rights.REFUSED:
            return list(need.operations)
        raise
    if allowed is None:
        return []
    allowed_names = {operation.replace("_", "").lower() for operation in allowed}
    return [operation for operation in need.operations if operation.lower() not in allowed_names]


def _of_topic(seen: Seen, name: str) -> frozenset[str] | None:
    """The names of the operations that this user may do with a topic; None if the brokers do not say."""
    admin = seen.cluster.admin()
    answers = admin.describe_topics(
        TopicCollection([name]), include_authorized_operations=True, request_timeout=ASK_SECONDS
    )
    allowed = answers[name].result(ASK_SECONDS + 1).authorized_operations
    return None if allowed is None else frozenset(operation.name for operation in allowed)
