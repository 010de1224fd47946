"""Repairs through a real server's admin routes: planned, reviewed, checked once more, recorded, repeatable.

What took effect, is in a queue or in doubt is never sent again; a repair that is killed continues where it was.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from notify.client import Consumer, Inbox
from notify.client.tables.definitions import half_message, notify_inbox
from notify.client.transport.http import HttpClient
from notify.errors import Conflict, DeadLetter, InvalidRequest
from notify.protocol import ids
from notify.spark.audit import Audit
from notify.spark.explain.explained import explain
from notify.spark.explain.repairs import records_of
from notify.spark.inputs.databases import Database
from notify.spark.repair.journal import Journal
from notify.spark.repair.plan import MOST_WITHOUT_FORCE, Item, RepairPlan, read_plan
from notify.spark.repair.planning import plan_of
from notify.spark.result import Found, Inputs, Result
from notify.testing.process import ServerProcess
from tests.audit.audited import AT_ONCE, wait_until_closed
from tests.audit.repairing import carried_out, in_queue, lost, opened, outbox_row, result_of
from tests.audit.shop import TOPIC, Shop
from tests.support.clock import eventually
from tests.support.commands import cli
from tests.support.groups import Caller, die, lag, running, subscribe
from tests.support.http import REASON, admin, post
from tests.support.transactions import new_id


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server that sends no checks, so that transactions stay in doubt."""
    process = ServerProcess(tmp_path / "data", environment={"NOTIFY_CHECK_BACKOFF_SECONDS": "3600"}).start()
    yield process
    process.stop()


def audited(spark: Any, inputs: Inputs, scratch: Path) -> Result:
    """An audit for which all earlier transactions are closed."""
    wait_until_closed(inputs.databases[0], AT_ONCE)
    return Audit(spark, AT_ONCE, inputs, scratch).run()


def half(server: ServerProcess, transaction_id: str, source: str) -> str:
    """Store a half without an outcome; return its shard."""
    message = {"topic": TOPIC, "body": "1"}
    transaction = {"id": transaction_id, "messages": [message], "check_after": 3600}
    request = {"producer_group": "orders", "source": source, "transactions": [transaction]}
    return str(post(server.url, "/v1/transactions", request)["items"][0]["shard"])


def actions(server: ServerProcess) -> list[str]:
    return [row["what"] for row in admin(server.url, "GET", "actions")["actions"]]


def effect(shop: Shop, message_id: str, group: str = "points") -> None:
    with shop.engine.begin() as connection:
        row = {"consumer_group": group, "message_id": message_id, "created_at": sa.func.now()}
        connection.execute(notify_inbox.insert().values(row))


@pytest.mark.long
def test_findings_are_mended_and_the_next_audit_is_clean(
    spark: Any, server: ServerProcess, shop: Shop, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    with running(shop.consumer):
        for _ in range(30):
            shop.order()
        eventually(lambda: len(shop.effects()) == 30 and lag(server.url, "points") == 0, "30 effects, acknowledged")
        plant_faults(shop, server)
        with opened(shop, server) as inputs:
            first = audited(spark, inputs, tmp_path / "scratch")
            expected = {"IN_DOUBT": 2, "CONFLICT": 1, "LOST": 1, "ACKED_NO_EFFECT": 3}
            assert {k: v for k, v in first.counts.items() if v and k != "REDELIVERED"} == expected
            assert first.exit_code == 1
            plan_of(first, inputs).write(path)
        plan = read_plan(path)
        plan.check_force(force=False)
        assert sorted(item.action for item in plan.items) == ["decide"] * 2 + ["redeliver"] * 3 + ["republish"] * 2
        assert all(item.evidence["detail"] and item.evidence["effects"] == "none" for item in plan.items)

        before = actions(server)
        preview = carried_out(shop, server, plan, path, dry_run=True)
        assert len(preview) == 7 and all(row["dry_run"] and row["status"] for row in preview), preview
        assert actions(server) == before and len(shop.effects()) == 27
        for expected_status in ({200, 201}, {200, 201}):  # a repetition changes nothing
            done = carried_out(shop, server, plan, path)
            assert {row["status"] for row in done} <= expected_status, done
        kinds = actions(server)
        assert {"transaction.commit", "transaction.rollback", "message.republish", "message.redeliver"} <= set(kinds)
        # The committed one in doubt, and the conflict, the lost one and three repeated effects, each with an inbox row
        # for its new id and one for its first id.
        mended = 27 + 1 + 2 * (1 + 1 + 3)
        eventually(lambda: len(shop.effects()) == mended and lag(server.url, "points") == 0, "the effects of these")
        (tmp_path / "plan.json.journal").unlink()  # even without it nothing is sent twice
        again = {row["status"] for row in carried_out(shop, server, plan, path)}
        assert again <= {0, 200} and len(shop.effects()) == mended
        with opened(shop, server) as inputs:
            second = audited(spark, inputs, tmp_path / "scratch")
        assert (second.verdict, second.exit_code) == ("PASS", 0), (second.counts, second.reasons)
        explained_after_repairs(shop, server, first, path)


def explained_after_repairs(shop: Shop, server: ServerProcess, first: Result, path: Path) -> None:
    """Each repair is told with its id, what it became, who did it and why."""
    names = ("LOST", "ACKED_NO_EFFECT", "IN_DOUBT")
    of_class = {name: [f for f in first.found if f.finding == name] for name in names}
    with opened(shop, server) as inputs:
        for name, what, group in (("LOST", "published again", ""), ("ACKED_NO_EFFECT", "sent again", "points")):
            message_id = of_class[name][0].message_id
            known = explain(inputs, message_id, path.parent / "scratch", (1, 1))
            (sent,) = known.repairs
            assert (sent.what, sent.to, sent.of) == (what, group, message_id)
            assert sent.record is not None and sent.record.reason == "a test"
            assert known.exit_code == 0 and "It is repaired" in known.sentence, known.sentence
            # The effect of what was sent again stands under the first id, too, and so nothing lacks it any more.
            assert known.verdicts[0].finding == ("LOST" if name == "LOST" else "")
            assert "settled by points" in sent.sentence and "with its effect" in sent.sentence
            told = [event.what for event in known.events]
            assert any(what in text and "a test" in text for text in told), told
            origin = explain(inputs, sent.verdict.message_id, path.parent / "scratch", (1, 1))
            assert "a test" in origin.repeats
        known = explain(inputs, of_class["IN_DOUBT"][0].message_id, path.parent / "scratch", (1, 1))
        assert {record.reason for record in known.decisions} == {"a test"}


def plant_faults(shop: Shop, server: ServerProcess) -> None:
    consumed = sorted(shop.transactions())
    with contextlib.closing(Database(shop.url)) as database:
        source = database.source_id()
    # In doubt: the database committed one, and has no row of the other.
    doubt, unknown, conflict, missing = (new_id() for _ in range(4))
    shard = half(server, doubt, source)
    half(server, unknown, source)
    # Conflict: an operator forced the outcome against the database.
    half(server, conflict, source)
    admin(server.url, "POST", f"transactions/{conflict}/rollback", {})
    with shop.engine.begin() as connection:
        for name in (doubt, conflict):
            connection.execute(half_message.insert().values(shop.row(name, shards=shard)))
        # Acknowledged, but the effect was deleted.
        gone = [f"{name}.0" for name in consumed[:3]]
        connection.execute(notify_inbox.delete().where(notify_inbox.c.message_id.in_(gone)))
    outbox_row(shop, missing)  # lost by the log


@pytest.mark.long
def test_nothing_is_planned_where_an_effect_or_a_doubt_exists(server: ServerProcess, shop: Shop) -> None:
    took_effect, was_sent, good, nowhere = (outbox_row(shop) for _ in range(4))
    effect(shop, took_effect)
    transaction, number = ids.parse_message_id(was_sent)
    effect(shop, ids.message_id(ids.derived(transaction, ids.republished(number)), 0))
    with shop.engine.begin() as connection:
        gone = half_message.c.transaction_id == nowhere.partition(".")[0]
        connection.execute(half_message.delete().where(gone))
        hollow = f"{new_id()}.0"
        connection.execute(half_message.insert().values(shop.row(hollow.partition(".")[0])))
    queued, seen = outbox_row(shop), outbox_row(shop)
    cases = [
        lost(took_effect), lost(was_sent), lost(good), lost(nowhere), lost(hollow), lost(queued, queued_us=1),
        lost(seen, effect_us=1),
    ]  # fmt: skip
    with opened(shop, server) as inputs:
        plan = plan_of(result_of(*cases), inputs)
        assert [item.message_id for item in plan.items] == [good]
        why = {held.message_id: held.why for held in plan.held_back}
        assert "took effect in points" in why[took_effect] and "took effect in points" in why[was_sent]
        assert "committed" in why[nowhere] and "content" in why[hollow]
        assert why[queued] == "it is in a queue" and "took effect" in why[seen]
        unsure = result_of(lost(good), lost(took_effect), reasons=("a segment is missing",))
        doubtful, forced = plan_of(unsure, inputs), plan_of(unsure, inputs, force=True)
    assert not doubtful.items and len(doubtful.held_back) == 2
    assert [item.message_id for item in forced.items] == [good], "forced or not: never where an effect stands"
    for each in (doubtful, forced):
        with pytest.raises(InvalidRequest, match="a segment is missing"):
            each.check_force(force=False)


@pytest.mark.long
def test_the_command_carries_out_a_plan_and_says_what_is_left(
    server: ServerProcess, shop: Shop, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    names = [outbox_row(shop) for _ in range(2)]
    with opened(shop, server) as inputs:
        plan_of(result_of(*map(lost, names)), inputs).write(path)
    effect(shop, names[1])
    words = [
        "audit", "run", "--repair", str(path), "--database", f"shop={shop.url}", "--log", str(server.data_dir), "--url",
        server.url, "--reason", "a test", "--report", str(tmp_path), "--json",
    ]  # fmt: skip
    code, said = cli(*words)
    assert (code, said["done"], said["left"]) == (1, 1, 1)
    assert [row["status"] for row in said["repairs"]] == [201, 0]
    assert cli(*words, "--plan", str(tmp_path / "other.json"))[0] == 2


@pytest.mark.long
def test_a_dry_run_says_what_it_would_do_and_a_repair_what_it_did(
    server: ServerProcess, shop: Shop, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    names = [outbox_row(shop) for _ in range(3)]
    with opened(shop, server) as inputs:
        plan_of(result_of(*map(lost, names)), inputs).write(path)
    effect(shop, names[2])
    words = [
        "audit", "run", "--repair", str(path), "--database", f"shop={shop.url}", "--log", str(server.data_dir), "--url",
        server.url, "--reason", "a test", "--report", str(tmp_path),
    ]  # fmt: skip
    code, said = cli(*words, "--dry-run")
    *_, last = said["text"].strip().splitlines()
    assert code == 1 and last == (
        "would publish 2 messages again; 1 message would be held back or refused. A dry run: nothing was changed"
    )
    assert f"LOST {names[0]}: would publish it again from the local row" in said["text"] and "200" not in said["text"]
    code, said = cli(*words, "--dry-run", "--json")
    assert (code, said["dry_run"], said["would_do"], said["done"], said["left"]) == (1, True, 2, 0, 1)
    assert admin(server.url, "GET", "topics")["topics"] == []
    code, said = cli(*words)
    assert said["text"].strip().splitlines()[-1] == "published 2 messages again; 1 message was held back or refused"
    code, said = cli(*words)
    assert "2 messages had been repaired before" in said["text"]
    with opened(shop, server) as inputs:
        transaction = names[0].partition(".")[0]
        (server_s,) = records_of(inputs, transaction, ())
        both = records_of(inputs, transaction, [path])
    assert server_s.reason.startswith("a test (") and {record.reason for record in both} == {server_s.reason}
    assert {record.what for record in both} == {"message.republish", "plan.republish"}


@pytest.mark.long
def test_a_redriven_dead_letter_is_told(server: ServerProcess, shop: Shop, tmp_path: Path) -> None:
    consumer = Consumer(server.url, group="mail", inbox=Inbox(shop.engine))
    mended = threading.Event()

    @consumer.subscribe(TOPIC, start="earliest")
    def handle(message: Any, session: Any) -> None:
        if not mended.is_set():
            raise DeadLetter("no such customer")

    def letters() -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = admin(server.url, "GET", "groups/mail/dead-letters")["messages"]
        return listed

    with running(consumer):
        shop.order()
        eventually(letters, "a dead letter")
        (transaction,) = shop.transactions()
        with opened(shop, server) as inputs:
            dead = explain(inputs, transaction, tmp_path / "scratch", (1, 1))
        assert (dead.verdicts[0].finding, dead.repairs, dead.exit_code) == ("DEAD", [], 0)
        mended.set()
        admin(server.url, "POST", "groups/mail/dead-letters/redrive", {"all": True})  # a job, which names no message
        eventually(lambda: shop.effects() and lag(server.url, "mail") == 0, "its effect")
    with opened(shop, server) as inputs:
        known = explain(inputs, transaction, tmp_path / "scratch", (1, 1))
    (sent,) = known.repairs
    assert (sent.what, sent.to, sent.of) == ("redriven", "mail", f"{transaction}.0")
    assert sent.record is not None and (sent.record.what, sent.record.reason) == ("dead_letter.redrive", REASON)
    assert "settled by mail" in sent.sentence and "It is repaired" in known.sentence and known.exit_code == 0


@pytest.mark.long
def test_a_dropped_dead_letter_is_told(server: ServerProcess, shop: Shop, tmp_path: Path) -> None:
    subscribe(server.url, "mail", TOPIC)
    shop.order()
    (transaction,) = shop.transactions()
    eventually(lambda: in_queue(server) == 1, "the message")
    die(Caller(server.url, "mail", "i"), TOPIC, 1, "no such customer")
    wanted = {"wanted": {"contains": "customer"}}
    job = admin(server.url, "POST", "groups/mail/dead-letters/drop", wanted)["result"]["job"]
    eventually(lambda: admin(server.url, "GET", f"jobs/{job}")["state"] == "done", "the end of the job")
    with opened(shop, server) as inputs:
        known = explain(inputs, transaction, tmp_path / "scratch", (1, 1))
    (dropped,) = known.repairs
    assert (dropped.what, dropped.to, dropped.of) == ("dropped", "mail", f"{transaction}.0")
    assert dropped.record is not None and dropped.record.what == "dead_letter.drop"
    assert dropped.sentence.startswith("dropped from the dead letters of group mail, by ")
    assert known.sentence.endswith("It was given up: dropped from the dead letters of group mail.")


def test_rows_of_an_inbox_that_were_purged_prove_nothing(server: ServerProcess, shop: Shop) -> None:
    message_id = outbox_row(shop)
    with shop.engine.begin() as connection:
        connection.execute(sa.text("UPDATE notify_source SET inbox_from = 4102444800000"))  # the year 2100
    settled = Found("ACKED_NO_EFFECT", new_id(), groups=["points"], log="data", evidence={"acked_us": 1})
    with opened(shop, server) as inputs:
        plan = plan_of(result_of(lost(message_id), settled), inputs)
    assert not plan.items and all("purged" in held.why for held in plan.held_back)


@pytest.mark.long
def test_items_that_changed_after_the_plan_are_skipped(server: ServerProcess, shop: Shop, tmp_path: Path) -> None:
    names = took_effect, came, half_there, changed, tomb, good = [outbox_row(shop) for _ in range(6)]
    with opened(shop, server) as inputs:
        plan = plan_of(result_of(*map(lost, names)), inputs)
    assert len(plan.items) == 6
    effect(shop, took_effect)
    message = {"topic": TOPIC, "body": "1"}
    post(server.url, "/v1/messages", {"messages": [message | {"id": came}]})
    half(server, half_there.partition(".")[0], "")
    with shop.engine.begin() as connection:
        t = half_message
        connection.execute(t.update().where(t.c.transaction_id == changed.partition(".")[0]).values(body=b'{"n": 100}'))
        connection.execute(t.update().where(t.c.transaction_id == tomb.partition(".")[0]).values(state="ROLLED_BACK"))
    rows = {row["message_id"]: row for row in carried_out(shop, server, plan, tmp_path / "plan.json")}
    assert rows[good]["status"] == 201
    assert {name: rows[name]["status"] for name in names[:5]} == dict.fromkeys(names[:5], 0)
    assert in_queue(server) == 2, "the one that came by itself and the good one"
    # The server refuses the same for its own queues, whoever asks.
    asked = {"reason": "a test", "messages": [{"id": n, "topic": TOPIC} for n in (came, half_there)]}
    answered = admin(server.url, "POST", "messages/republish", asked)["result"]["items"]
    assert [item["status"] for item in answered] == [409, 409]
    assert in_queue(server) == 2


def test_an_inbox_knows_what_is_published_again(server: ServerProcess, shop: Shop) -> None:
    known, new = outbox_row(shop), outbox_row(shop)
    handled: list[str] = []
    consumer = Consumer(server.url, group="points", inbox=Inbox(shop.engine))
    consumer.subscribe(TOPIC, start="earliest")(lambda message, session: handled.append(message.first_id))
    effect(shop, known)  # of which neither the audit nor the server knows
    asked = {"reason": "a test", "messages": [{"id": name, "topic": TOPIC} for name in (known, new)]}
    with running(consumer):
        admin(server.url, "POST", "messages/republish", asked)
        eventually(lambda: len(handled) >= 1 and lag(server.url, "points") == 0, "both are settled")
    assert handled == [new]


class Killed(BaseException):
    """Stands for the death of the process."""


@pytest.mark.long
@pytest.mark.parametrize("point", ["before the call", "after the call"])
def test_a_repair_that_is_killed_goes_on(
    point: str, server: ServerProcess, shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    with opened(shop, server) as inputs:
        plan = plan_of(result_of(*[lost(outbox_row(shop)) for _ in range(5)]), inputs)
    call = HttpClient.call

    async def dying(self: HttpClient, method: str, *rest: Any, **named: Any) -> bytes:
        if point == "after the call":
            await call(self, method, *rest, **named)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(HttpClient, "call", dying)
        with pytest.raises(Killed):
            carried_out(shop, server, plan, path)
    journal = tmp_path / "plan.json.journal"
    assert [json.loads(line)["state"] for line in journal.read_text().splitlines()] == ["plan", *["begun"] * 5]
    with journal.open("a") as file:
        file.write('{"key": "republish:cut sho')
    rows = carried_out(shop, server, plan, path)
    assert {row["status"] for row in rows} <= {200, 201} and in_queue(server) == 5
    assert {row["detail"] for row in carried_out(shop, server, plan, path)} == {"done before"}
    assert in_queue(server) == 5


def test_one_process_at_a_time_carries_a_plan_out(server: ServerProcess, shop: Shop, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with opened(shop, server) as inputs:
        plan = plan_of(result_of(lost(outbox_row(shop))), inputs)
    with Journal(path), pytest.raises(Conflict):
        carried_out(shop, server, plan, path)


def item(number: int) -> Item:
    return Item(f"republish:{number}", "republish", "LOST", f"{new_id()}.0", "publish it again")


def plan_with(items: list[Item], needs_force: tuple[str, ...] = ()) -> RepairPlan:
    return RepairPlan(1, "", "", "", [], "FINDINGS", {}, [], list(needs_force), items, [])


@pytest.mark.long
def test_a_plan_that_suggests_a_lost_input_needs_force(server: ServerProcess, shop: Shop, tmp_path: Path) -> None:
    many = plan_with([item(n) for n in range(MOST_WITHOUT_FORCE + 1)])
    with pytest.raises(InvalidRequest, match="501 repairs"):
        many.check_force(force=False)
    many.check_force(force=True)
    plan_with(many.items[1:]).check_force(force=False)  # a person took one out
    few = result_of(*[lost(outbox_row(shop)) for _ in range(11)])
    few.totals["committed"] = 20
    wiped = [
        Found("ACKED_NO_EFFECT", new_id(), groups=["points"], log="data", evidence={"acked_us": 1}) for _ in range(11)
    ]
    effect(shop, f"{new_id()}.0")
    with opened(shop, server) as inputs:
        plan = plan_of(result_of(*wiped), inputs)
        assert len(plan.items) == 11 and "inbox of group points lacks 11 effects and has 1" in plan.needs_force[0]
        assert "11 of 20 committed" in plan_of(few, inputs).needs_force[0]
    with pytest.raises(InvalidRequest, match="--force"):
        plan.check_force(force=False)


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = plan_with([item(1), item(2)])
    plan.write(path)
    assert read_plan(path) == plan
    with pytest.raises(InvalidRequest, match="not overwritten"):
        plan.write(path)
    for text in ("", "{}", '{"items": 1}', msgspec.json.encode(plan_with([item(1)] * 2)).decode()):
        path.write_text(text)
        with pytest.raises(InvalidRequest):
            read_plan(path)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_plan(tmp_path / "none.json")
