"""The schedule of checks holds what may still be checked: not what was decided, nor groups without a transaction."""

from __future__ import annotations

from notify.protocol import ids
from notify.storage.log.pending import LEAST_COMPACTED, Pending, PendingTable
from notify.storage.log.queues import TopicsById
from notify.storage.log.records import Sender

SECOND = 1_000_000
T0 = 1_800_000_000_000_000


def begin(table: PendingTable, group: str, due_us: int) -> bytes:
    """Add an undecided transaction of a group; returns its id."""
    transaction_id = ids.new_id()
    table.by_id[transaction_id] = Pending(transaction_id, Sender(group, "", "", 5 * SECOND), [], T0, due_us)
    table.schedule(group, due_us, (transaction_id,))
    return transaction_id


def test_transactions_that_were_decided_late_are_forgotten_although_nobody_polls_for_their_group() -> None:
    """Each one that took longer than `check_after` stayed on the schedule until the server's next start."""
    table = PendingTable(TopicsById())
    open_ids = [begin(table, "g", T0 + SECOND)]
    for _ in range(3 * LEAST_COMPACTED):
        transaction_id = begin(table, "g", T0 + SECOND)
        table.ripen(T0 + 2 * SECOND)
        del table.by_id[transaction_id]
    assert len(table._schedules["g"].heap) <= LEAST_COMPACTED
    claimed = table.claim("g", T0 + 2 * SECOND, 100, 10 * SECOND)
    assert [due.id for due in claimed] == open_ids


def test_a_group_without_an_undecided_transaction_has_no_schedule() -> None:
    """Each turn of the server went through every producer group that had sent anything since the start."""
    table = PendingTable(TopicsById())
    decided = [begin(table, f"g{number}", T0 + SECOND) for number in range(3)]
    undecided = begin(table, "waits", T0 + SECOND)
    for transaction_id in decided:
        del table.by_id[transaction_id]
    table.ripen(T0)
    assert len(table._schedules) == 4
    table.ripen(T0 + SECOND)
    assert list(table._schedules) == ["waits"] and table.next_us("g0") is None
    assert [due.id for due in table.claim("waits", T0 + SECOND, 100, 10 * SECOND)] == [undecided]
    begin(table, "g0", T0 + 2 * SECOND)
    assert table.next_us("g0") == T0 + 2 * SECOND
