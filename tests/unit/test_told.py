"""Previews and results of writes are sentences that a person understands, whatever the admin route answers."""

from __future__ import annotations

from typing import Any

import pytest

from notify.server.console.told import told

EFFECTS = "handlers with an inbox do nothing"


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
        ("dead-letters.redrive-all", {"job": 7}, ["Job 7 does it"], 0),
        (
            "messages.redeliver",
            {"items": [{"id": "a.0"}, {"id": "b.0", "status": 404, "detail": "no such message"}]},
            ["1 message to be sent again, 1 message refused."],
            2,
        ),
        (
            "topic.purge",
            {"queues": [{"queue": 0, "dropped": 3}], "missed": {"points": 2}},
            ["3 messages of g at most are deleted", "Group points never gets 2 messages"],
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
def test_a_known_write_is_told(name: str, result: Any, sentences: list[str], rows: int) -> None:
    made = told(name, "g", result)
    said = "\n".join(made.sentences)
    assert all(sentence in said for sentence in sentences), said
    assert len(made.rows.cells if made.rows else []) == rows and not made.facts


def test_other_writes_are_fields_by_name_and_tables() -> None:
    answer = {"revision": 4, "is_new": True, "values": {"a": 1.5, "b": None}, "rows": [{"queue": 1}]}
    made = told("settings.put", "x", answer)
    assert made.facts == {"Revision": "4", "Is new": "yes", "Values": "a: 1.5, b: –"}
    assert made.rows is not None and (made.rows.headings, made.rows.cells) == (["Queue"], [["1"]])
    assert "{" not in str(made.facts.values())
