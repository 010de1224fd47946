"""A stored plan that is carried out and killed again and again: each effect happens once."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from notify.spark.repair.planning import plan_of
from notify.spark.result import Found
from notify.testing.process import ServerProcess
from tests.audit.killed_repair import NO_CHECKS, Ledger, Repairs, WholeRuns, in_doubt
from tests.audit.repairing import lost, opened, outbox_row, result_of
from tests.audit.shop import Shop
from tests.support.clock import eventually
from tests.support.groups import running


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server that sends no checks, so that transactions stay in doubt."""
    process = ServerProcess(tmp_path / "data", environment=NO_CHECKS).start()
    yield process
    process.stop()


@pytest.mark.parametrize(
    ("rounds", "kills"), [(1, 4), pytest.param(20, 10, marks=[pytest.mark.long, pytest.mark.timeout(3000)])]
)
def test_no_effect_happens_twice_however_often_a_repair_is_killed(
    server: ServerProcess, shop: Shop, tmp_path: Path, rounds: int, kills: int
) -> None:
    ledger = Ledger(shop, server.url)
    log = server.data_dir
    with running(ledger.consumer, subscribed=True), Repairs(shop.url, log, server.url) as repairs:
        for number in range(rounds):
            before = set(shop.transactions())
            for _ in range(2):
                shop.order()
            acknowledged = {f"{name}.0" for name in shop.transactions() - before}
            eventually(lambda: acknowledged <= ledger.times().keys() and ledger.settled(), "the effects")  # noqa: B023
            ledger.forget(acknowledged)
            cases = [lost(outbox_row(shop)) for _ in range(3)] + [in_doubt(server, shop) for _ in range(2)]
            cases += [
                Found(
                    "ACKED_NO_EFFECT", name.partition(".")[0], groups=["points"], log="data", evidence={"acked_us": 1}
                )
                for name in sorted(acknowledged)
            ]
            path = tmp_path / f"plan-{number}" / "plan.json"
            path.parent.mkdir()
            with opened(shop, server) as inputs:
                plan = plan_of(result_of(*cases), inputs)
            assert len(plan.items) == len(cases), plan.held_back
            plan.write(path)
            repairs.run_often(path, kills)
            names = {case.message_id for case in cases}
            eventually(lambda: names <= ledger.times().keys() and ledger.settled(), "the repaired effects")  # noqa: B023
            repairs.run(path)  # once more, after the effects
            eventually(ledger.settled, "nothing is left")
            assert set(ledger.times().values()) == {1}, ledger.times()
        print(f"{repairs.killed} repairs were killed, {rounds * kills - repairs.killed} ended before")
        assert repairs.killed


@pytest.mark.long
def test_an_audit_after_repairs_that_were_killed_passes(
    spark: Any, server: ServerProcess, shop: Shop, tmp_path: Path
) -> None:
    assert list(WholeRuns(spark, server, shop, tmp_path).run(1)) == []


# --- two people carry out copies of one plan at the same time, each with a journal of its own: no effect happens twice


@pytest.mark.long
@pytest.mark.parametrize("kills", [0, 10])
def test_copies_of_a_plan_that_are_carried_out_at_once(
    server: ServerProcess, shop: Shop, tmp_path: Path, kills: int
) -> None:
    ledger = Ledger(shop, server.url)
    given = (shop.url, server.data_dir, server.url)
    with running(ledger.consumer, subscribed=True), Repairs(*given, seed=1) as first, Repairs(*given, seed=2) as second:
        for _ in range(4):
            shop.order()
        acknowledged = {f"{name}.0" for name in shop.transactions()}
        eventually(lambda: acknowledged <= ledger.times().keys() and ledger.settled(), "the effects")
        ledger.forget(acknowledged)
        cases = [lost(outbox_row(shop)) for _ in range(6)] + [in_doubt(server, shop) for _ in range(4)]
        cases += [
            Found("ACKED_NO_EFFECT", name.partition(".")[0], groups=["points"], log="data", evidence={"acked_us": 1})
            for name in sorted(acknowledged)
        ]
        plans = [tmp_path / name / "plan.json" for name in ("one", "other")]
        for path in plans:
            path.parent.mkdir()
        with opened(shop, server) as inputs:
            plan = plan_of(result_of(*cases), inputs)
        assert len(plan.items) == len(cases), plan.held_back
        plan.write(plans[0])
        shutil.copy(*plans)
        threads = [
            threading.Thread(target=repairs.run_often, args=(path, kills))
            for repairs, path in zip((first, second), plans, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        names = {case.message_id for case in cases}
        eventually(lambda: names <= ledger.times().keys() and ledger.settled(), "the repaired effects")
        assert set(ledger.times().values()) == {1}, ledger.times()
