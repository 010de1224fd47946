"""A watch whose state is of other inputs than it is given: it says so, and takes back nothing of what it said."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from notify.spark.inputs.identities import identities_of
from notify.spark.result import Found, Inputs, Result
from tests.audit.scripted_watch import BEGIN_US, Scripted
from tests.audit.trade import SENDERS, WITH_INBOX, Trade
from tests.support.receiver import Receiver

SHOP, BANK = {"database 1": "database shop"}, {"database 2": "database bank"}


def watched(state: Path, inputs: dict[str, str], lost: bool, alarm_url: str = "") -> Scripted:
    """A watch of one input, in which the first window lacks a message, or does not."""

    def made(start: int) -> Result:
        found = [Found("LOST", "a", at_us=BEGIN_US)] if lost and start == BEGIN_US else []
        return Result("FINDINGS" if found else "PASS", found=found, totals={"committed": 1}, identities=inputs)

    return Scripted(state, made, alarm_url)


@pytest.mark.parametrize("then", [SHOP, SHOP | BANK, BANK])
def test_a_finding_is_not_revised_by_an_audit_of_other_inputs(tmp_path: Path, then: dict[str, str]) -> None:
    with contextlib.closing(Receiver()) as receiver:
        assert watched(tmp_path, SHOP, True, receiver.url).run(2).kinds() == ["finding"]
        kinds = watched(tmp_path, then, False, receiver.url).run(4).kinds()
        assert kinds == (["revision"] if SHOP.items() <= then.items() else ["inconclusive"])
        assert watched(tmp_path, then, False, receiver.url).run(4).kinds() == [], "once"
        told = [body for body in receiver.taken if body["kind"] == "inconclusive"]
        assert [("database shop was not given again" in body["detail"]) for body in told] == [True] * (then is BANK)


def test_inputs_are_known_by_what_stays_the_same(trade: Trade) -> None:
    with trade.inputs() as inputs:
        known = identities_of(inputs)
        assert known == {
            **{f"database {trade.source(name)}": f"database {name}" for name in (*SENDERS, WITH_INBOX)},
            "log log": "log log",
        }
        inputs.databases[0].name = "renamed"
        assert identities_of(inputs).keys() == known.keys()
        fewer: Inputs = replace(inputs, databases=inputs.databases[1:])
        assert identities_of(fewer).keys() < known.keys()
