"""Previews and results of writes are sentences that a person understands, whatever the admin route answers."""

from __future__ import annotations

import getpass
import os
from typing import Any

import pytest

from notify.admin_api.actor import signed
from notify.admin_api.queue_rows import sorted_groups, state
from notify.admin_api.writes import FORMS, described

EFFECTS = "handlers with an inbox skip messages"
ORDERS: dict[str, Any] = {
    "count": 7, "parked": 2, "producer_groups": {"orders": 7}, "youngest_seconds": 185.0, "oldest_seconds": 7210.0,
    "left_out": 0, "is_more": False,
}  # fmt: skip
"""The preview of a decision on seven transactions."""
UNKNOWN = {"id": "b", "status": 404, "detail": "no such transaction is known here"}
POLICY = {"retention": 86_400, "retention_bytes": 1 << 30, "flush": "sync", "ttl": 0, "backlog": 0,
          "backlog_policy": "refuse"}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "result", "sentences", "rows"),
    [
        ("transaction.commit", {"state": "COMMITTED", "changed": True}, ["The transaction is COMMITTED."], 0),
        (
            "transaction.rollback",
            {"state": "PARKED", "becomes": "ROLLED_BACK", "messages": [{"topic": "t", "key": None, "groups": None}]},
            ["The transaction is PARKED now, and becomes ROLLED_BACK.", "1 message, which no group ever receives:"],
            1,
        ),
        (
            "transactions.rollback",
            ORDERS | {"becomes": "ROLLED_BACK", "messages": 9, "young": 0, "topics": [{"topic": "t", "messages": 9}]},
            [
                "7 transactions of producer group orders, in doubt for 3 min to 2 h, will be rolled back: 9 messages "
                "will never be delivered.",
            ],
            1,
        ),
        (
            "transactions.commit",
            ORDERS
            | {"becomes": "COMMITTED", "messages": 1, "young": 2, "left_out": 1, "is_more": True}
            | {"producer_groups": {"orders": 5, "billing": 2}, "topics": [{"topic": "t", "messages": 1, "groups": []}]},
            [
                "of producer groups orders (5) and billing (2), in doubt for 3 min to 2 h, will be committed: ",
                "1 message will be delivered.",
                "2 of them are PREPARED and younger than 10 min: their local transactions may still run.",
                "An outcome of their producer that contradicts yours",
                "1 transaction of those chosen will be refused: they are decided already, or not known.",
                "More match: these are the oldest 7. Do it again for the others.",
            ],
            1,
        ),
        (
            "transactions.check",
            ORDERS | {"becomes": "PREPARED", "offline": ["orders"]},
            [
                "will be checked now: the server asks their producers.",
                "2 of them are PARKED: they become PREPARED, and get all their checks again.",
                "No producer polls for the checks of orders now. These checks wait until one does.",
            ],
            0,
        ),
        (
            "transactions.rollback",
            ORDERS | {"count": 0, "becomes": "ROLLED_BACK"},
            ["No transaction without an outcome matches: nothing will be done."],
            0,
        ),
        (
            "transactions.commit",
            {"becomes": "COMMITTED", "items": [{"id": "a", "status": 200, "state": "COMMITTED"}, UNKNOWN]},
            ["1 transaction is COMMITTED; 1 refused."],
            2,
        ),
        (
            "topic.put",
            POLICY | {"queue_count": 3, "ttl": 60, "backlog": 1000},
            [
                "Topic g has 3 queues.",
                "It keeps messages for 1 d, at most 1.0 GiB.",
                "Senders are answered once messages are on the disk.",
                "Messages that were not received within 1 min expire.",
                "When a group is 1,000 messages behind, more are refused.",
            ],
            0,
        ),
        (
            "settings.put",
            {"revision": 3, "changes": {"check_attempts": {"from": 16, "to": 9}}},
            ["Revision 3 changes these settings:"],
            1,
        ),
        (
            "limits.put",
            {"topics": {"mail": 200.0}, "producer_groups": {}, "consumer_groups": {}},
            ["From now on these names have a rate, and no others:"],
            1,
        ),
        (
            "group.reset",
            {"queues": [{"queue": 0, "from": 9, "to": 2, "again": 7, "left_out": 0}], "effects": EFFECTS},
            ["The group gets 7 messages again.", f"Effects: {EFFECTS}."],
            1,
        ),
        (
            "group.pause",
            {"paused": True, "within_seconds": 5},
            ["Group g is paused", "Consumers follow within 5 s."],
            0,
        ),
        (
            "dead-letters.redrive",
            {"ids": ["a.0"], "effects": EFFECTS},
            ["1 message of the dead letters goes to g again."],
            1,
        ),
        (
            "dead-letters.redrive",
            {"items": [{"id": "a.0", "status": 201}], "next_offset": 7},
            ["1 message sent again.", "Later dead letters were not looked at."],
            1,
        ),
        ("dead-letters.redrive-all", {"job": 7}, ["Job 7 is running"], 0),
        ("transactions.commit", {"job": 101, "jobs": [101, 102]}, ["Jobs 101, 102 do it"], 0),
        (
            "messages.redeliver",
            {"items": [{"id": "a.0"}, {"id": "b.0", "status": 404, "detail": "no such message"}]},
            ["1 message to be sent again, 1 message refused."],
            2,
        ),
        (
            "topic.purge",
            {"queues": [{"queue": 0, "dropped": 3}], "missed": {"points": 2}},
            ["At most 3 messages of g are deleted", "Group points never receives 2 messages"],
            0,
        ),
        (
            "topic.delete",
            {"queues": [{"start": 1, "end": 5}], "name": "g"},
            ["Topic g is deleted with its 4 messages"],
            0,
        ),
    ],
)
def test_a_known_write_is_described(name: str, result: Any, sentences: list[str], rows: int) -> None:
    made = described(name, "g", result)
    said = "\n".join(made.sentences)
    assert all(sentence in said for sentence in sentences), said
    assert len(made.rows.cells if made.rows else []) == rows and not made.facts


def test_other_writes_are_fields_by_name_and_tables() -> None:
    answer = {"revision": 4, "is_new": True, "values": {"a": 1.5, "b": None}, "rows": [{"queue": 1}]}
    made = described("a.write.of.a.later.version", "x", answer)
    assert made.facts == {"Revision": "4", "Is new": "yes", "Values": "a: 1.5, b: –"}
    assert made.rows is not None and (made.rows.headings, made.rows.cells) == (["Queue"], [["1"]])
    assert "{" not in str(made.facts.values())


def test_every_write_of_the_console_has_a_sentence() -> None:
    """Its preview was a list of fields for those without one."""
    assert [name for name, write in FORMS.items() if write.describe is None] == []


# --- states of groups in words, and the order of their list ---------------------------------------------------------

CALM: dict[str, Any] = {
    "name": "calm", "lag": 1, "consumers": 1, "paused": False, "oldest_seconds": 0.2, "dead_letters": 0,
    "is_failing": False, "latency": {"commit_to_ack": None},
}  # fmt: skip


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({}, "up to date"),
        ({"oldest_seconds": 5.0}, "behind"),
        ({"oldest_seconds": None}, "up to date"),
        ({"oldest_seconds": None, "lag": 100}, "behind"),
        ({"lag": 0, "oldest_seconds": 9.0}, "up to date"),
        ({"dead_letters": 3, "oldest_seconds": 60.0}, "dead letters"),
        ({"dead_letters": 3, "is_failing": True}, "failing"),
        ({"consumers": 0, "is_failing": True}, "no consumer"),
        ({"consumers": 0, "lag": 0}, "up to date"),
        ({"consumers": 0, "paused": True}, "paused"),
    ],
)
def test_the_state_of_a_group_is_what_needs_an_operator_most(row: dict[str, Any], words: str) -> None:
    assert state(CALM | row) == words


def test_groups_that_fail_now_come_before_those_that_are_only_behind() -> None:
    rows = [
        CALM | {"name": "slow", "lag": 60, "oldest_seconds": 38.0},
        CALM | {"name": "old letters", "dead_letters": 900},
        CALM | {"name": "fails", "dead_letters": 203, "is_failing": True},
        CALM | {"name": "alone", "consumers": 0},
        CALM | {"name": "paused", "paused": True, "lag": 5, "consumers": 0, "oldest_seconds": 1.0},
    ]
    names = [row["name"] for row in sorted_groups(rows, "pain", 10)]
    assert names == ["alone", "fails", "slow", "paused", "old letters"]


# --- A command says who ran it, whatever the system knows of its user -----------------------------------------------


@pytest.mark.parametrize("error", [KeyError("getpwuid(): uid not found: 1234"), OSError("No username set")])
def test_a_user_without_a_name_signs_with_a_number(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers often run as a user that their system does not list; each write ended with a traceback there."""

    def fail() -> str:
        raise error

    monkeypatch.setattr(getpass, "getuser", fail)
    assert signed("looked at") == f"looked at (uid {os.getuid()})"
