"""Databases as storage: an audit of all of them passes, and one that was not given is missed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from notify.errors import InvalidRequest
from notify.spark.audit import Audit
from notify.spark.explain.explained import explain
from notify.spark.inputs.databases import Database
from notify.spark.inputs.shards import halves_from_us
from notify.spark.judge.completeness_proof import Proof, refuse_doubled, refuse_foreign
from notify.spark.judge.coverage import cover
from notify.spark.result import Inputs, Result
from notify.storage.sql.engines import open_engine
from notify.storage.sql.rows import moment_of
from notify.storage.sql.tables import server_key_map, server_key_map_change, server_member
from tests.audit.audited import PLAN, found
from tests.audit.sharded import SHARDS, inputs_of, make_sharded, storage_url
from tests.audit.trade import COUNT, Trade


@pytest.fixture(scope="module")
def sharded(sound: Trade, tmp_path_factory: pytest.TempPathFactory) -> Trade:
    return make_sharded(sound, tmp_path_factory.mktemp("sharded") / "trade")


def change(trade: Trade, shard: str, *statements: Any) -> None:
    engine = open_engine(storage_url(trade, shard))
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(sa.text(statement) if isinstance(statement, str) else statement)
    engine.dispose()


def reasons_of(inputs: Inputs, scratch: Path, from_us: int = 0) -> list[str]:
    """The reasons to doubt, without Spark."""
    for log in inputs.logs:
        log.facts or log.prepare(None, scratch)
    result = Result()
    proof = Proof(inputs, result, from_us, 1 << 52)
    proof.of_sources()
    assert proof.of_storages() == any(line.kind == "storage" for line in result.coverage)
    return result.reasons


@pytest.mark.long
def test_messages_in_a_storage_that_was_not_given_are_not_lost(spark: Any, sound: Trade, tmp_path: Path) -> None:
    lost, rolled_back, refused, dropped, last = 7, 9, 11, 13, COUNT - 1  # all of them the bank's
    trade = make_sharded(sound, tmp_path / "trade", {lost, 8, rolled_back, refused, dropped, last})
    of_it = f"state = 'ROLLED_BACK' WHERE transaction_id = '{trade.name(rolled_back)}'"
    trade.execute("bank", f"UPDATE half_message SET shards = '', {of_it}")
    trade.execute("points", f"DELETE FROM notify_inbox WHERE message_id = '{trade.message(rolled_back)}'")
    relayed = "UPDATE server_half_message SET relayed = {} WHERE transaction_id = '{}'"
    change(
        trade, "b", f"UPDATE server_half_message SET {of_it}", relayed.format(2, trade.name(refused)),
        relayed.format(3, trade.name(dropped)),
    )  # fmt: skip
    with inputs_of(trade) as inputs:
        whole = Audit(spark, PLAN, inputs, tmp_path / "scratch").run()
        verdicts = [explain(inputs, trade.message(n), tmp_path / "copies", (5, 5)).verdicts for n in (lost, last)]
    assert (whole.verdict, whole.reasons) == ("FINDINGS", [])
    assert found(whole) == {
        "LOST": {trade.message(lost), trade.message(8)}, "DROPPED": {trade.message(dropped)},
        "UNSENT": {trade.message(refused), trade.message(last)},
    }  # fmt: skip
    assert [verdict.finding for (verdict,) in verdicts] == ["LOST", "UNSENT"]
    with inputs_of(trade, ["a"]) as inputs:
        part = Audit(spark, PLAN, inputs, tmp_path / "scratch").run()
    assert found(part) == {"LOST": {trade.message(8)}} and part.counts["PENDING"] == 4
    assert len(part.reasons) == 3 and all("--storage" in reason for reason in part.reasons), part.reasons


@pytest.mark.long
def test_a_sound_trade_over_storages_belongs_together(sharded: Trade, tmp_path: Path) -> None:
    with inputs_of(sharded) as inputs:
        assert reasons_of(inputs, tmp_path) == []
        refuse_foreign(inputs)
        assert sum(log.count_from(None) for log in inputs.logs) == COUNT
    with inputs_of(sharded, ["a", "a"]) as inputs, pytest.raises(InvalidRequest, match="shard a"):
        refuse_doubled(inputs)
    with inputs_of(sharded, []) as inputs:
        reasons_of(inputs, tmp_path)
        with pytest.raises(InvalidRequest, match="--storage"):
            refuse_foreign(inputs)


@pytest.mark.long
def test_each_storage_that_was_not_given_is_missed(sharded: Trade, tmp_path: Path) -> None:
    with inputs_of(sharded, ["a"]) as inputs:
        unknown, unnamed = reasons_of(inputs, tmp_path)
        assert "payments" in unknown and "shard b is named by the key map of storage shard-a" in unnamed
    with inputs_of(sharded, ["b"]) as inputs:
        unknown, unnamed = reasons_of(inputs, tmp_path)
        assert "orders" in unknown and "no given storage has the key map" in unnamed


@pytest.mark.long
def test_a_shard_is_expected_while_the_registry_names_it(sharded: Trade, tmp_path: Path) -> None:
    trade = sharded.copy(tmp_path / "trade")
    left_us = trade.at(COUNT // 2)
    both, alone = '["a", "b"]', '["a"]'
    change(
        trade, "a", server_key_map.delete(), server_key_map_change.delete(),
        server_key_map.insert().values(version=1, shards=both, made_at=moment_of(trade.first_us)),
        server_key_map.insert().values(version=2, shards=alone, made_at=moment_of(left_us)),
    )  # fmt: skip

    def missed(from_us: int) -> list[str]:
        with inputs_of(trade, ["a"]) as inputs:
            return [reason for reason in reasons_of(inputs, tmp_path / "scratch", from_us) if "shard b" in reason]

    assert len(missed(0)) == len(missed(left_us)) == 1 and missed(left_us + 1) == []
    at = moment_of(left_us)
    member = {
        "name": "server-1", "kind": "server", "url": "http://127.0.0.1:7400", "roles": "transactions", "shards": "a,b",
        "room": "", "load": 0.0, "detail": "{}", "started_at": at, "seen_at": at,
    }  # fmt: skip
    change(trade, "a", server_member.insert().values(member))
    (reason,) = missed(left_us + 1)
    assert "list of servers" in reason
    own = {"shards": "c,d"}  # a server with a log, which is in the registry, too
    change(trade, "a", server_member.update().values(own))
    assert missed(left_us + 1) == []


def test_tombstones_of_halves_that_retention_has_deleted_are_no_orphans(sharded: Trade, tmp_path: Path) -> None:
    """Also where an older half is parked, which retention leaves: it was taken for the first that the storage has."""
    trade = sharded.copy(tmp_path / "trade")
    kept, parked = trade.name(11), trade.name(1)
    change(
        trade, "b", f"DELETE FROM server_half_message WHERE transaction_id < '{kept}' AND transaction_id != '{parked}'",
        f"UPDATE server_half_message SET state = 'PARKED', decided_at = NULL WHERE transaction_id = '{parked}'",
    )  # fmt: skip
    with inputs_of(trade) as inputs:
        assert halves_from_us(inputs.storages) == trade.at(11) + 2000  # when it was decided
        for log in inputs.logs:
            log.prepare(None, tmp_path / "scratch")
        assert cover(PLAN, inputs, frozenset(), Result()).terms.halves_from_us == halves_from_us(inputs.storages)
    assert halves_from_us([]) == 0


def test_a_ghost_over_storages_is_explained_and_a_message_of_no_database_is_none(
    sharded: Trade, tmp_path: Path
) -> None:
    """The log names only the storage that the messages came through."""
    trade = sharded.copy(tmp_path / "trade")
    ghost, prepared = 20, 22
    for n in (ghost, prepared):
        trade.execute("shop", f"DELETE FROM half_message WHERE transaction_id = '{trade.name(n)}'")
    change(
        trade, "a", f"UPDATE server_half_message SET source = 'none' WHERE transaction_id = '{trade.name(prepared)}'"
    )
    with inputs_of(trade) as inputs:
        told = [explain(inputs, trade.message(n), tmp_path / "copies", (5, 5)).verdicts[0] for n in (ghost, prepared)]
    assert [verdict.finding for verdict in told] == ["GHOST", ""]


@pytest.mark.long
def test_a_message_of_no_database_is_no_ghost_after_its_half_is_deleted(
    spark: Any, sharded: Trade, tmp_path: Path
) -> None:
    """Retention deletes the half, and its queue does not say that it was in no database. Younger ghosts are found."""
    trade = sharded.copy(tmp_path / "trade")
    prepared, ghost, without_half = 0, COUNT - 4, COUNT - 2  # all of them the shop's
    gone = (prepared, ghost, without_half)
    for n in gone:
        trade.execute("shop", f"DELETE FROM half_message WHERE transaction_id = '{trade.name(n)}'")
    change(
        trade, "a", f"DELETE FROM server_half_message WHERE transaction_id < '{trade.name(4)}'",
        f"DELETE FROM server_half_message WHERE transaction_id = '{trade.name(without_half)}'",
    )  # fmt: skip
    with inputs_of(trade) as inputs:
        told = {n: explain(inputs, trade.message(n), tmp_path / "copies", (5, 5)).verdicts[0] for n in gone}
        assert [verdict.finding for verdict in told.values()] == ["", "GHOST", ""]
        result = Audit(spark, PLAN, inputs, tmp_path / "scratch").run()
    # The one without a half began within the skew of clocks after the first half that is left.
    assert found(result)["GHOST"] == {trade.message(ghost)}


def test_beside_kafka_local_rows_name_the_storages(sharded: Trade) -> None:
    with inputs_of(sharded, ["a"]) as inputs:
        over_kafka = Inputs(inputs.databases, (), (), ())
        result = Result()
        assert Proof(over_kafka, result, 0, 1 << 52).of_storages()
        for reason, (shard, name) in zip(result.reasons, (("a", "shop"), ("b", "bank")), strict=True):
            assert f"shard {shard} is named by the local rows of database {name}" in reason


def test_the_storage_of_another_cluster_is_told(sharded: Trade, tmp_path: Path) -> None:
    """It has the same name, and over Kafka nothing else tells."""
    trade = sharded.copy(tmp_path / "trade")
    change(trade, "b", "UPDATE server_half_message SET transaction_id = substr(transaction_id, 1, 35) || 'x'")
    with inputs_of(trade) as inputs:
        result = Result()
        over_kafka = Inputs(inputs.databases, (), (), inputs.storages)
        assert Proof(over_kafka, result, 0, 1 << 52).of_storages()
    (reason,) = result.reasons
    assert "storage shard-b has the name of shard b" in reason


def test_a_storage_whose_halves_were_deleted_is_missed(sharded: Trade, tmp_path: Path) -> None:
    trade = sharded.copy(tmp_path / "trade")
    change(trade, "b", "DELETE FROM server_half_message")
    with inputs_of(trade) as inputs:
        (reason,) = reasons_of(inputs, tmp_path / "scratch")
        assert "storage shard-b: server_half_message is empty" in reason
        assert reasons_of(inputs, tmp_path / "scratch", trade.at(COUNT)) == [], "nothing came from it since"


def test_a_database_that_is_a_storage_too_is_to_be_read_as_one(sharded: Trade, tmp_path: Path) -> None:
    with inputs_of(sharded) as inputs:
        storage = Database(storage_url(sharded, SHARDS[1]), "both")
        try:
            databases = [*inputs.databases, storage]
            assert reasons_of(Inputs(databases, inputs.logs, (), inputs.storages), tmp_path) == []
            reasons = reasons_of(Inputs(databases, inputs.logs, (), inputs.storages[:1]), tmp_path)
        finally:
            storage.close()
    assert any("database both is a storage of servers" in reason for reason in reasons), reasons
