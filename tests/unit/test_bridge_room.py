"""A batch of a bridge finds room for all that it writes before anything changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from notify.protocol.wire import BridgeBatch
from notify.storage.log import LogStore
from notify.storage.log.journal import Journal

T0 = 1_800_000_000_000_000


async def test_room_is_made_for_the_bytes_of_both_positions_and_the_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room: list[tuple[Journal, int]] = []
    reserve = Journal.reserve

    def noted(journal: Journal, size: int) -> None:
        reserve(journal, size)
        room.append((journal, journal.end + size))

    monkeypatch.setattr(Journal, "reserve", noted)
    store = LogStore(tmp_path)
    await store.open(T0)
    at = ""
    for position, base in (("ö" * 60_000, None), ("1", None), ("2", "ö" * 60_000)):
        batch = BridgeBatch(epoch=1, expected_position=at, position=position, claim=not at, base=base)
        await store.append_from_bridge("s", batch, [], T0)
        journal, until = room[0][0], max(until for _, until in room)
        assert journal.end <= until
        at = position
    await store.close()
