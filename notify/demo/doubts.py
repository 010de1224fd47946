"""Transactions in doubt, followed until they are decided: which of them were resolved by asking back.

The servers' own record says so. A transaction counts where it is decided and the log of its checks holds the answer
that says how; a late outcome that came by itself leaves no such entry, and a record that died with a killed server
counts for nothing.
"""

from __future__ import annotations

from typing import Any

from notify.demo.end import Lost
from notify.demo.proof import Proof
from notify.demo.topology import Topology

WATCHED_AFTER_SECONDS = 1.0
"""Younger than this no half is asked about: it saves asking for the record of each that is just being committed."""

_DECIDED_BY = {"COMMITTED": "COMMIT", "ROLLED_BACK": "ROLLBACK"}


class Doubts:
    """The transactions in doubt now; the proof takes those that are resolved."""

    def __init__(self, topology: Topology, proof: Proof) -> None:
        self._topology = topology
        self._proof = proof
        self._open: dict[str, Lost | None] = {}

    def add(self, lost: Lost) -> None:
        """A producer died before it sent this outcome."""
        self._proof.lost.append(lost)
        self._open[lost.transaction] = lost

    def look(self) -> None:
        """See what is undecided, and look up what is not any more."""
        rows = self._topology.undecided()
        self._proof.undecided = len(rows)
        for row in rows:
            if row["age"] > WATCHED_AFTER_SECONDS:
                self._open.setdefault(row["id"], None)
        for transaction_id in self._open.keys() - {row["id"] for row in rows}:
            record = self._topology.transaction(transaction_id)
            if record["state"] in _DECIDED_BY:
                self._take(record, self._open.pop(transaction_id))

    def _take(self, record: dict[str, Any], lost: Lost | None) -> None:
        state = record["state"]
        if lost is not None:
            lost.state, lost.checks = state, record["checks"]
        if any(check["what"] == _DECIDED_BY[state] for check in record["checks"]):
            self._proof.in_doubt[state] = self._proof.in_doubt.get(state, 0) + 1
