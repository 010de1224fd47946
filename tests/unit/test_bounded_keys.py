"""Every cache, and every dict or set that outlives a call, has keys that are bounded in size and number.

A new one fails here until it is listed with its bound. A key that comes from outside and is refused must leave nothing
behind: refused names of 7 MB filled a server's memory from a cache of 4,096 names.
"""

from __future__ import annotations

import ast
import asyncio
import gc
import re
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import notify
from notify.errors import Forbidden, InvalidId, InvalidRequest
from notify.protocol import ids, keys, limits
from notify.protocol.limits import LIMITS, NAME_CHARACTERS, check_name
from notify.server.access import browsers, tokens
from notify.server.access.gate import KNOWN_BYTES, Access
from notify.server.access.oidc import TOKEN_BYTES
from notify.server.access.principal import REMEMBERED, Principal
from notify.server.access.rights import parse_rights
from notify.server.core.bridges import MOST_REPORTS, Bridges
from notify.server.core.checks import MOST_GROUPS, Checks
from notify.server.delivery.instances import MOST_INSTANCES, Instances
from notify.server.settings import Settings
from tests.support.issuer import Provider

ROOT = Path(notify.__file__).parent
FOLDERS = {"": ROOT, "storage": (ROOT / "storage").resolve(), "spark": (ROOT / "spark").resolve()}
LEFT_OUT = ("cli/bench/", "testing/", "cli/demo_shop/")
"""Programs that no server and no application runs."""
CONTAINERS = ("dict", "set", "OrderedDict", "defaultdict", "Counter", "WeakKeyDictionary", "WeakValueDictionary")
CACHES = ("cache", "lru_cache")
TEXTS = {"str", "bytes", "object", "Any", "Callable", "Key", "Place", "Spot", "Push", "Future"}
"""Types of keys that hold a text, or may. Numbers, and objects of ours, have the bounds of what they stand for."""

BOUNDS = {
    "the cache's own number, and a key that is checked before: it has a bound, and a refused one is not kept": """
        protocol/ids.py:from_text protocol/keys.py:_hash_of protocol/limits.py:_accept server/access/browsers.py:_is_own
        client/kafka/handling.py:_instant server/data/routes.py:self._find server/letters/failures.py:kind_of
    """,
    "our own words and objects: modes, statuses, settings, calls that wait": """
        cli/api.py:_Answer
        client/consumer/session.py:_polls client/tables/background_connections.py:_returning
        server/management.py:_routes server/watch/alarms.py:waiting
        cli/overview.py:_ends cli/main.py:command server/webhooks.py:_tls runtime/tracing.py:_tracer
        runtime/measures.py:_instrument
        protocol/wire.py:_to_the_second
        server/data/answer.py:_HEADS server/data/routes.py:_plain server/data/routes.py:_named
        kafka/cluster.py:_LOGGED binlog_bridge/errors.py:_logged_at storage/sql/rows.py:_second
        storage/transactions.py:NO_TOKENS storage/transactions.py:NO_SHARDS spark/inputs/damage.py:_tables
        spark/tasks.py:cores_of spark/watch/watching.py:WINDOWS spark/watch/watching.py:FINDINGS
        spark/watch/watching.py:REVISIONS spark/watch/watching.py:LOOKS spark/watch/watching.py:FAILURES
        server/access/principal.py:_waiting client/producer/checker.py:running client/producer/handles.py:_unfinished
        kafka/exchange.py:_waiting
        server/connections/turns.py:_waiting server/console/open_pages.py:_files
        server/console/open_pages.py:_login_page movers/left_behind.py:_complaints
    """,
    "names that `check_name` took, of 127 characters: topics and groups that exist, with their queues": """
        server/core/flow.py:gates server/delivery/followers.py:by_name server/delivery/followers.py:by_topic
        server/delivery/followers.py:_instances server/delivery/group.py:cursors server/delivery/group.py:before
        server/delivery/instances.py:_of_topic server/watch/alarms.py:_unread_us
        server/delivery/owners.py:by_topic server/delivery/turns.py:_of_topic server/delivery/waiters.py:_by_group
        server/letters/failures.py:_counts server/watch/alarms.py:raised server/watch/alarms.py:_posted
        server/core/objectives.py:_samples
        server/watch/alarms.py:_seen_us server/watch/alarms.py:_ailing_us server/watch/alarms.py:_lags
        server/schedules/schedules.py:_all server/schedules/schedules.py:_away_us
        server/delivery/cursor.py:_ahead server/delivery/leases.py:open
    """,
    "a number beside the container, and keys that are checked before": """
        server/delivery/instances.py:Instances
        server/access/gate.py:_verified_lately server/access/gate.py:_quotas server/access/lookup.py:_until
        server/access/principal.py:_answers server/access/oidc.py:_keys server/core/bridges.py:_reports
        server/latency.py:_by_name server/console/forms.py:_answers
        server/core/check_log.py:_entries server/core/checks.py:_polled_us server/core/reports.py:_received
        server/core/subscriptions.py:_fresh server/delivery/instances.py:bounds
        server/core/subscriptions.py:_changes
        server/delivery/instances.py:answers
        server/letters/failures.py:by_fingerprint
        server/watch/figures.py:_series server/watch/figures.py:_before
        server/watch/figures.py:latencies server/watch/silences.py:_silences
        server/webhooks.py:_found client/handling/failure_log.py:_traced client/transport/http.py:_heads
        client/kafka/settling.py:_too_large client/tables/schemas.py:_known client/tables/schemas.py:_last
        client/tables/half_rows.py:_inserts
        kafka/topics.py:_largest kafka/topics.py:_compacted client/tables/log_rows.py:_slots
        client/producer/left_behind.py:_left client/producer/left_behind.py:_last
        client/producer/left_sender.py:_known
        binlog_bridge/binlog/tables.py:_readers binlog_bridge/binlog/tables.py:_by_definition
        movers/sinks/queue_server.py:_not_passed
        storage/sql/checks.py:_look_us storage/sql/store.py:_topics storage/sql/writer.py:_known
        spark/messages/shipped.py:self._read_page spark/messages/shipped.py:self._open_table
        storage/log/withdrawals.py:waiting storage/log/withdrawals.py:recent
        storage/memory/withdrawals.py:_waiting storage/memory/withdrawals.py:_pending
    """,
    "calls that wait now; a group without one is dropped": """
        server/core/checks.py:_pollers server/core/check_webhooks.py:_running server/core/pushes.py:_running
        server/core/pushes.py:failing server/delivery/waiters.py:_by_request client/producer/outgoing.py:_until
    """,
    "what an administrator stored, with bounds of number and size of its own": """
        server/access/gate.py:_credentials server/access/gate.py:_by_proof server/access/gate.py:_principals
        server/core/objectives.py:by_group server/configuration/revisions.py:objectives
        server/access/gate.py:used_us server/configuration/follow.py:_versions
        server/configuration/revisions.py:check_webhooks server/configuration/revisions.py:pushes
        server/core/flow.py:_groups server/delivery/followers.py:_rates
    """,
    "addresses and names of the servers that the last answer told of": """
        client/transport/servers.py:_down client/transport/servers.py:_reached client/transport/batch.py:_batchers
        movers/sinks/queue_server.py:_at
        storage/sql/shards.py:_opened storage/sql/shards.py:_probing storage/sql/shards.py:_probed
    """,
    "names in the application's own database, of 64 bytes, and its open transaction": """
        runtime/schemas.py:within runtime/guarantees.py:_verified check/sources.py:_by_schema check/sources.py:_former
        check/sources.py:_met
        check/sources.py:_warned check/sources.py:_unsafe movers/relay/by_position.py:_sent_until
        movers/relay/rows.py:_until movers/relay/relay.py:_due movers/relay/relay.py:_open_step
        movers/relay/relay.py:_held
        movers/relay/relay.py:_backoffs movers/relay/relay.py:_stands_by movers/relay/relay.py:_elsewhere
        movers/relay/relay.py:_publishers movers/relay/relay.py:_showings movers/relay/sources.py:by_schema
        movers/relay/sources.py:unsafe client/producer/left_sender.py:_reported client/producer/left_sender.py:_looks
        binlog_bridge/batching.py:_savepoints
        binlog_bridge/binlog/position.py:_runs binlog_bridge/binlog/reader.py:_left
        binlog_bridge/bridge.py:_source_ids
        binlog_bridge/postgresql/reader.py:_decided
    """,
    "names that the brokers have, of 249 characters; keys of CompactedTopics, of KEY_BYTES": """
        client/kafka/membership.py:_waiting client/kafka/ownership.py:_topics client/kafka/partitions.py:_windows
        client/kafka/partitions.py:paused client/kafka/partitions.py:_jumps client/kafka/starting.py:_starts
        client/kafka/feed.py:_hiding client/kafka/feed.py:_told_hidden client/kafka/modes.py:_others
        client/kafka/modes.py:_told client/kafka/starting.py:_leaderless client/kafka/topics.py:_missed
        client/kafka/topics.py:_last
        kafka/topic_ids.py:_ids server/groups/kafka/compacted.py:_ids server/groups/kafka/compacted.py:_read_to
        server/groups/kafka/letter_counts.py:_counted
        server/groups/kafka/subscriptions.py:_by_group server/groups/kafka/oldest.py:_times_us
        server/groups/kafka/oldest.py:_looked server/groups/kafka/sources.py:_known
        server/groups/kafka/latest_snapshot.py:_since server/groups/kafka/latest_snapshot.py:_blocked
        server/groups/kafka/sources.py:_reports server/groups/kafka/latest_snapshot.py:_by_group
        movers/sinks/delays/release.py:_offsets movers/sinks/delays/release.py:_requests
        movers/sinks/delays/release.py:_ids movers/sinks/delays/release.py:_asked
        movers/sinks/delays/release.py:_refused movers/sinks/delays/slots.py:_waiting movers/sinks/kafka.py:_granted
        kafka/subscriptions.py:_moving kafka/subscriptions.py:_moved
    """,
    "ids, keys and topics of one batch, or of the messages in hand, which has its own bound": """
        binlog_bridge/bridge.py:_returned client/kafka/window.py:_done client/kafka/window.py:_failed
        client/kafka/window.py:_lines client/handling/hand.py:_batches client/producer/running.py:_outcomes
        client/producer/left_sender.py:_keys
        client/producer/transactions.py:_deadlines movers/sinks/kafka.py:_failed movers/sinks/kafka.py:_bad
        movers/sinks/order.py:topics movers/sinks/order.py:_keys movers/sinks/order.py:_refused
        movers/sinks/queue_server.py:items
    """,
    "what the application's own code names: handlers, sources, instances": """
        client/consumer/consumer.py:_handlers client/django/configured.py:_producers
        client/django/engine.py:django_engine_of
        client/inbox/inbox.py:_turns client/consumer/sessions.py:_sessions client/producer/outgoing.py:_moving
        client/bodies/stores.py:_opened
    """,
    "what is stored, and was checked when it was taken; an audit's names of it": """
        spark/tables/manifest.py:columns spark/inputs/catalog.py:names spark/checks/left_out.py:_filters
        spark/checks/left_out.py:_payloads spark/checks/left_out.py:tags storage/log/checkpoint.py:bridge_bases
        storage/log/checkpoint.py:paused storage/log/checkpoint.py:attempts storage/log/checkpoint.py:deaths
        storage/log/checkpoint.py:interruptions storage/log/checkpoint.py:retry_at storage/log/checkpoint.py:moved
        storage/log/checkpoint.py:held storage/log/checkpoint.py:forgiven
        storage/log/frame.py:points storage/log/open_part.py:decided storage/log/open_part.py:rolled_back
        storage/log/pending.py:by_id storage/log/pending.py:_schedules storage/log/state.py:topics
        storage/log/pending.py:Asked storage/memory/withdrawals.py:_collapsed_at
        storage/memory/withdrawals.py:delayed
        storage/memory/withdrawals.py:_withdrawn storage/memory/withdrawals.py:_ends
        storage/log/state.py:subscriptions storage/log/state.py:patterns storage/log/state.py:priorities
        storage/log/state.py:progress storage/log/state.py:paused storage/log/state.py:bridges
        storage/log/state.py:bridge_bases storage/memory/groups.py:_paused storage/memory/groups.py:_patterns
        storage/memory/groups.py:_priorities storage/memory/groups.py:_subscriptions storage/memory/groups.py:_progress
        storage/memory/queues.py:_topics storage/memory/queues.py:_queues storage/memory/queues.py:_turns
        storage/memory/queues.py:_placed storage/memory/transactions.py:_records storage/memory/transactions.py:_bridges
        storage/memory/transactions.py:_bridge_bases spark/inputs/catalog.py:producer_groups
        spark/inputs/databases.py:sound spark/inputs/segments.py:groups spark/inputs/segments.py:_sent
        spark/inputs/segments.py:_names spark/inputs/segments.py:_lists spark/inputs/segments.py:_sets
        spark/inputs/segments.py:_seen spark/inputs/log_shipped.py:_hashed spark/messages/planning.py:_compared
        spark/repair/journal.py:done spark/repair/plan.py:evidence spark/repair/plan.py:identities
        spark/inputs/scan.py:_source_hashes spark/inputs/scan.py:_group_numbers spark/tables/manifest.py:offsets
    """,
}
"""The containers (`file:name`) by the bound of their keys' size and number."""


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


_CONTAINERS, _CACHES = "|".join(CONTAINERS), "|".join(CACHES)
MADE = re.compile(
    rf"= {{}}|\b(?:{_CONTAINERS})\(|^\s*class \w+\([^)]*\b(?:{_CONTAINERS})\b|\b(?:{_CACHES})\b", re.MULTILINE
)
"""A file without any of these makes no cache and no container, and is not parsed: all of them take seconds."""
CALLED_LATER = re.compile(rf"\b(?:{_CACHES})\(")
"""A cache that may wrap a function in an expression."""


def census(text: str) -> list[str]:
    """The names of the caches and of the containers for many keys in the text of one file."""
    if not MADE.search(text):
        return []
    tree = ast.parse(text)
    found = [name for statement, is_local in _statements(tree, False) for name in _made_by(statement, is_local)]
    if CALLED_LATER.search(text):
        found += [
            ast.unparse(node.args[0])
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Call) and _name(node.func.func) in CACHES
        ]
    return found


def _statements(parent: ast.AST, is_local: bool) -> Iterator[tuple[ast.stmt, bool]]:
    """All statements below a node, and whether they are in a function. Expressions, nine of ten nodes, have none."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        inner = getattr(parent, field, ())
        for child in inner if isinstance(inner, list) else ():
            if isinstance(child, ast.stmt):
                yield child, is_local
            yield from _statements(child, is_local or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)))


def _made_by(statement: ast.stmt, is_local: bool) -> Iterator[str]:
    """The names of what a statement makes: a cached function, a kind of container, or a container."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
        for decorator in statement.decorator_list:
            if _name(decorator.func if isinstance(decorator, ast.Call) else decorator) in CACHES:
                yield statement.name
    elif isinstance(statement, ast.ClassDef):  # a kind of container counts for all that are made of it
        if any(
            _name(base.value if isinstance(base, ast.Subscript) else base) in CONTAINERS for base in statement.bases
        ):
            yield statement.name
    elif isinstance(statement, ast.AnnAssign):
        if statement.value is not None and _has_texts(statement.annotation):
            yield from _kept_container(statement.target, statement.value, is_local)
    elif isinstance(statement, ast.Assign):
        for target in statement.targets:
            yield from _kept_container(target, statement.value, is_local)


def _has_texts(annotation: ast.expr) -> bool:
    """Whether the keys of such a container are texts, or may be."""
    if not isinstance(annotation, ast.Subscript):
        return True
    key = annotation.slice
    if isinstance(key, ast.Tuple) and _name(annotation.value) != "set":
        key = key.elts[0]
    return any(_name(part) in TEXTS for part in ast.walk(key))


def _kept_container(target: ast.expr, value: ast.expr, is_local: bool) -> Iterator[str]:
    """The name of a container that begins empty, or is made again, and that is not local to a call."""
    is_kept = isinstance(target, ast.Attribute) or (isinstance(target, ast.Name) and not is_local)
    is_filled_later = isinstance(value, ast.Dict) and not value.keys
    is_filled_later |= isinstance(value, ast.Call) and _name(value.func) in CONTAINERS
    if is_kept and is_filled_later:
        yield _name(target)


def _census() -> Iterator[str]:
    for folder, root in FOLDERS.items():
        for path in sorted(root.rglob("*.py")):
            relative = path.relative_to(root)
            if folder or not (relative.parts[0] in FOLDERS or relative.as_posix().startswith(LEFT_OUT)):
                yield from (f"{Path(folder) / relative}:{name}" for name in census(path.read_text()))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("@cache\ndef f(a): pass", ["f"]),
        ("class A:\n    @functools.lru_cache(maxsize=4)\n    def f(self): pass", ["f"]),
        ("def f(self):\n    self.look = lru_cache(10)(self._look)", ["self._look"]),
        ("class Known(OrderedDict[str, int]): pass", ["Known"]),
        ("a: dict[str, int] = {}", ["a"]),
        ("a: dict[int, str] = {}\nb: set[tuple[str, int]] = set()", ["b"]),
        ("def f(self):\n    if x:\n        self.a = {}\n        b = {}", ["a"]),
        ("try:\n    a = Counter()\nexcept E:\n    b = defaultdict(int)\nelse:\n    c = {1: 2}", ["a", "b"]),
        ("match x:\n    case 1:\n        a = dict()", ["a"]),
        ("class A:\n    b: dict[str, int] = field(default_factory=dict)", []),
    ],
)
def test_a_cache_and_a_lasting_dict_are_seen(text: str, names: list[str]) -> None:
    assert census(text) == names


def test_every_cache_and_every_lasting_dict_is_listed_with_the_bound_of_its_keys() -> None:
    found = set(_census())
    listed = [name for names in BOUNDS.values() for name in names.split()]
    assert sorted(listed) == sorted(set(listed)), "each stands once"
    assert found - set(listed) == set(), "give each of these a bound of its keys' size and number, and list it"
    assert set(listed) - found == set(), "these are gone"


# --- what is refused leaves nothing behind ------------------------------------------------------------------------


def _kept(call: Callable[[int], object], times: int = 40) -> int:
    """The bytes that calls leave behind."""
    call(-1)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(times):
            call(number)
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


LONG = "n" * 1_000_000
KEPT = 500_000
"""Less than one of the long texts."""


def _refused(error: type[Exception], call: Callable[[], object]) -> None:
    with pytest.raises(error):
        call()


@pytest.mark.long
@pytest.mark.parametrize("text", ["", "/"], ids=["long", "with a character that no name has"])
def test_a_refused_name_is_not_kept(text: str) -> None:
    assert _kept(lambda n: _refused(InvalidRequest, lambda: check_name("topic", f"{n}{text}{LONG}"))) < KEPT
    before = limits._accept.cache_info().currsize
    for number in range(100):
        _refused(InvalidRequest, lambda number=number: check_name("topic", f"no name {number}"))  # type: ignore[misc]
    assert limits._accept.cache_info().currsize == before
    check_name("topic", "n" * NAME_CHARACTERS)
    _refused(InvalidRequest, lambda: check_name("topic", "n" * (NAME_CHARACTERS + 1)))


@pytest.mark.long
def test_a_long_key_is_hashed_but_not_kept() -> None:
    assert _kept(lambda n: keys.key_hash(f"{n}{LONG}")) < KEPT
    longest = "k" * LIMITS.key_bytes
    assert keys.key_hash(longest) == keys._hash_of(longest)


@pytest.mark.long
def test_a_refused_id_is_not_kept() -> None:
    assert _kept(lambda n: _refused(InvalidId, lambda: ids.from_text(f"{n}{LONG}"))) < KEPT


@pytest.mark.long
def test_a_host_that_no_name_is_long_enough_for_is_not_kept() -> None:
    assert _kept(lambda n: browsers.is_own_host(f"{n}{LONG}".encode(), "127.0.0.1", "")) < KEPT
    assert browsers.is_own_host(b"127.0.0.1:8080", "127.0.0.1", "")


def test_all_spellings_of_one_token_share_a_bound_of_bytes() -> None:
    """A token may follow any number of spaces, so that one holder had 10,000 long headers remembered."""

    async def remembered() -> tuple[int, int, bool]:
        async def look() -> None:
            pass

        provider = Provider()
        access = Access(Settings(access=True), look, provider=provider)  # type: ignore[arg-type]
        try:
            spaces = b"Bearer " + b" " * 16_000
            principal = await access.principal(spaces + b"long:view", None)
            for number in range(700):  # what `principal` does with each, without the pace of verifying
                access._remember(spaces + b"%d:view" % number, principal, None, 1 << 40)
            await access.principal(b"Bearer short:view", None)
            held = sum(map(len, access._verified_lately))
            return held, access._verified_bytes, access.known(b"Bearer short:view") is not None
        finally:
            access.close()

    held, counted, is_known = asyncio.run(remembered())
    assert held == counted <= KNOWN_BYTES and is_known
    assert KNOWN_BYTES > 100 * TOKEN_BYTES and tokens.id_of(b"short") is None


def test_instances_with_ever_new_names_are_forgotten_before_those_that_hold_messages() -> None:
    instances = Instances()
    instances.asking("holds", 0).in_flight = 1
    instances.asking("idle", 1)
    for number in range(MOST_INSTANCES + 100):
        instances.asking(f"i{number}", 2)
    assert len(instances) == MOST_INSTANCES
    assert "holds" in instances and "idle" not in instances


def test_groups_that_poll_once_and_sources_that_store_nothing_are_forgotten_beyond_a_number() -> None:
    now_us = 0
    unused: Any = SimpleNamespace()
    checks = Checks(unused, lambda: now_us, unused, "", unused, unused)
    bridges = Bridges(unused, lambda: now_us, unused)
    for number in range(MOST_GROUPS + 50):
        now_us += 1
        checks._note_poll(f"g{number}")
        checks._note_poll("polls on")
        bridges._report(f"s{number}").refused += 1
    assert len(checks._polled_us) == MOST_GROUPS and len(bridges._reports) == MOST_REPORTS
    assert checks.is_online("polls on") and checks.is_online(f"g{number}") and not checks.is_online("g0")


def test_refused_names_are_kept_in_bounds() -> None:
    """Refused names take little memory. 40 refused polls with names of megabytes took 110 to 955 MB."""
    principal = Principal("service", parse_rights(["consume:points", "publish:order.*"]))
    for n in range(3 * REMEMBERED):
        for name in (f"{n}" + "x" * 100_000, f"{n}" + "x" * (NAME_CHARACTERS - 10)):
            assert not principal.may("consume", name)
            assert not principal.may("consume", "points", name) or len(name) <= NAME_CHARACTERS
    held = sum(sys.getsizeof(part) for asked in principal._answers for part in asked)
    assert len(principal._answers) <= REMEMBERED and held < 1 << 20
    with pytest.raises(Forbidden) as refusal:
        principal.check("check", "x" * 1_000_000)
    assert len(str(refusal.value)) < 1000
    with pytest.raises(Forbidden) as refusal:
        principal.check_some("consume", "x" * 1_000_000)
    assert len(str(refusal.value)) < 1000
    assert principal.may("consume", "points") and principal.may("publish", "order.placed")
