"""Retention keeps dead letters until they are sent again or purged, in few files, also over a kill."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from notify.storage.groups import SettleKind
from notify.storage.log import orphan_indexes as husks_module
from notify.storage.names import redriven_id
from notify.storage.records import NewTransaction
from notify.storage.topics import Topic
from tests.contract.retained import HOUR, fill, opened, subscribed
from tests.contract.stores import T0
from tests.support.transactions import sent


def test_dead_letters_stay_until_they_are_sent_again_or_purged(tmp_path: Path) -> None:
    """Dead letters have no subscriber: the default retention would delete them before anyone has looked at them."""

    async def run() -> None:
        store = await subscribed(tmp_path / "log")
        await fill(store, 30, T0)
        for m in store.read("t", 0, 0, 30, 1 << 20):
            store.dead_letter_soon("c", [(m, m.payload)], T0)
        await fill(store, 40, T0)
        await store.settle("c", "t", 0, [(30, 40)], SettleKind.ACK, T0)
        letters = store.read("dead-letter.c", 0, 0, 100, 1 << 20)
        assert len(letters) == 30
        again = NewTransaction(
            redriven_id("dead-letter.c", letters[0].transaction_id, 0), "", sent(b"again").messages, committed=True
        )
        await store.put([again], T0 + 2 * HOUR)
        store.trim("dead-letter.c", 0, 5)  # a purge of the first five
        for hours in (3, 6, 9):
            await fill(store, 40, T0 + hours * HOUR)
            await store.settle("c", "t", 0, [(0, store.bounds("t", 0)[1])], SettleKind.ACK, T0)
            assert await store.retain(T0 + hours * HOUR) > 0
            kept = [m for m in store.read("dead-letter.c", 0, 0, 100, 1 << 20) if not m.corrupt]
            assert [m.offset for m in kept] == list(range(5, 30))
            assert [m.payload for m in kept] == [m.payload for m in letters[5:]]
            await store.close()
            store = opened(tmp_path / "log")
            await store.open(T0)
        # With a retention of its own the dead-letter topic is cleared.
        await store.create_topic(Topic("dead-letter.c", retention_us=HOUR))
        await fill(store, 40, T0 + 12 * HOUR)
        await store.settle("c", "t", 0, [(0, store.bounds("t", 0)[1])], SettleKind.ACK, T0)
        assert await store.retain(T0 + 12 * HOUR) > 0
        assert store.read("dead-letter.c", 0, 0, 100, 1 << 20) == []
        await store.close()

    asyncio.run(run())


def test_a_letter_that_was_sent_again_is_not_kept(tmp_path: Path) -> None:
    async def run() -> None:
        store = await subscribed(tmp_path / "log")
        await fill(store, 3, T0)
        for m in store.read("t", 0, 0, 3, 1 << 20):
            store.dead_letter_soon("c", [(m, m.payload)], T0)
        await store.sync()
        middle = store.read("dead-letter.c", 0, 1, 1, 1 << 20)[0]
        again = NewTransaction(
            redriven_id("dead-letter.c", middle.transaction_id, 1), "", sent(b"again").messages, committed=True
        )
        await store.put([again], T0)
        await fill(store, 40, T0)
        await fill(store, 40, T0 + 2 * HOUR)
        assert await store.retain(T0 + 2 * HOUR) > 0
        assert [m.offset for m in store.read("dead-letter.c", 0, 0, 10, 1 << 20) if not m.corrupt] == [0, 2]
        await store.close()

    asyncio.run(run())


@pytest.mark.long
def test_dead_letters_of_many_segments_keep_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dropped segment leaves its index if a letter was in it: such indexes are merged, also over a kill."""
    most = 4
    monkeypatch.setattr(husks_module, "MOST_HUSKS", most)

    async def run() -> None:
        store = await subscribed(tmp_path / "log")
        letters: list[bytes] = []

        async def one_more(at: int) -> None:
            await fill(store, 20, at)
            end = store.bounds("t", 0)[1]
            last = store.read("t", 0, end - 1, 1, 1 << 20)
            store.dead_letter_soon("c", [(last[0], last[0].payload)], at)
            letters.append(last[0].payload)
            await store.settle("c", "t", 0, [(0, end)], SettleKind.ACK, at)
            await store.retain(at)

        for hours in range(0, 20, 2):
            await one_more(T0 + hours * HOUR)

        def husks() -> list[str]:
            first = store.segments.all()[0].base
            return [name for name in store.disk.names() if name.endswith(".idx") and int(name[:20]) < first]

        def kept() -> list[bytes]:
            return [m.payload for m in store.read("dead-letter.c", 0, 0, 100, 1 << 20)]

        assert kept() == letters
        assert 1 < len(husks()) <= most + 4
        before = tmp_path / "before"
        shutil.copytree(tmp_path / "log", before)
        for hours in range(20, 40, 2):
            await one_more(T0 + hours * HOUR)
        assert kept() == letters
        await store.close()
        # A kill during a merge leaves files that lie within the merged one.
        left = [path for path in husks_of(before) if not (tmp_path / "log" / path.name).exists()]
        assert left
        for path in left:
            shutil.copy(path, tmp_path / "log" / path.name)
        store = opened(tmp_path / "log")
        await store.open(T0)
        assert kept() == letters
        assert not any((tmp_path / "log" / path.name).exists() for path in left)
        await store.close()

    asyncio.run(run())


def husks_of(directory: Path) -> list[Path]:
    """The indexes of dropped segments."""
    first = min(path.stem for path in directory.glob("*.log"))
    return [path for path in directory.glob("*.idx") if path.stem < first]
