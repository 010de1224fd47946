"""Follows transactions in doubt until they are decided, and counts those that check-back resolved.

A transaction counts if it is decided and the servers' record of its checks has the deciding answer. If a late outcome
of the producer decided it, there is no such answer; if a server was killed, its record is lost. Neither counts.
"""

from __future__ import annotations

from typing import Any

from notify.cli.demo_shop.end import Lost
from notify.cli.demo_shop.proof import Proof
from notify.cli.demo_shop.topology import Topology

WATCHED_AFTER_SECONDS = 1.0
"""The smallest age of a half that is followed; most younger halves are about to be committed."""

_DECIDED_BY = {"COMMITTED": "COMMIT", "ROLLED_BACK": "ROLLBACK"}


class Doubts:
    """The transactions that are in doubt now. Resolved transactions are added to the proof."""

    def __init__(self, topology: Topology, proof: Proof) -> None:
        self._topology = topology
        self._proof = proof
        self._open: dict[str, Lost | None] = {}

    def add(self, lost: Lost) -> None:
        """Add a transaction whose producer died before it sent the outcome."""
        self._proof.lost.append(lost)
        self._open[lost.transaction] = lost

    def look(self) -> None:
        """List the undecided transactions, and look up the followed ones that are no longer undecided."""
        rows = self._topology.undecided()
        self._proof.undecided = len(rows)
        for row in rows:
            if row["age"] > WATCHED_AFTER_SECONDS:
                self._open.setdefault(row["id"], None)
        for transaction_id in self._open.keys() - {row["id"] for row in rows}:
            record = self._topology.transaction(transaction_id)
            if record["state"] in _DECIDED_BY:
                self._add_decided(record, self._open.pop(transaction_id))

    def _add_decided(self, record: dict[str, Any], lost: Lost | None) -> None:
        state = record["state"]
        if lost is not None:
            lost.state, lost.checks = state, record["checks"]
        if any(check["what"] == _DECIDED_BY[state] for check in record["checks"]):
            self._proof.in_doubt[state] = self._proof.in_doubt.get(state, 0) + 1
