"""The rows of one INSERT with VALUES on MySQL and MariaDB."""

from __future__ import annotations

from notify.client.tables.half_rows import MOST_BYTES, TOGETHER, _parts


def test_a_statement_ends_at_a_number_of_rows_and_of_bytes() -> None:
    """Sixteen large bodies were one packet, above the server's max_allowed_packet."""
    sizes = [10] * (TOGETHER + 1) + [MOST_BYTES + 1, MOST_BYTES, MOST_BYTES - 5, 5, 1]
    parts = list(_parts([{"body": bytes(size)} for size in sizes] + [{}]))
    assert [len(part) for part in parts] == [TOGETHER, 1, 1, 1, 2, 2]
    assert list(_parts([])) == []
