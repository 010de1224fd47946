"""A watch compares the segments of a log with what it read of them before, also those of messages long ago."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from notify.spark.inputs.log_input import LogInput
from notify.spark.inputs.log_read import LogRead
from notify.spark.result import Plan, Result
from notify.spark.watch.watching import Watch
from notify.storage.log.disk import Disk
from notify.storage.log.restored_start import begin_at_the_end
from notify.storage.log.store import LogStore
from notify.storage.records import NewMessage, NewTransaction
from tools.bench.made_run import Made, make_log, payload_of, transaction_id

SECOND = 1_000_000
BEGIN_US = 1_700_000_000 * SECOND
COUNT, STEP_US = 600, 10_000
SEGMENT_BYTES = 1 << 16


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The log of a stopped server, in several segments."""
    made = Made(tmp_path_factory.mktemp("sound") / "log", COUNT, BEGIN_US, STEP_US)
    make_log(made, SEGMENT_BYTES)
    return made


class Watched:
    """A copy of a log, and a watch of it whose audits find nothing by themselves."""

    def __init__(self, sound: Made, directory: Path) -> None:
        self.made = sound
        self.log = directory / "log"
        self.older = sound.log
        """The log as it was."""
        shutil.copytree(sound.log, self.log)
        self._directory = directory
        self._now = time.time()

    def segments(self) -> list[Path]:
        return sorted(self.log.glob("*.log"))

    def _audit(self, plan: Plan) -> Result:
        log = LogInput(self.log, "queue")
        log.prepare(None, self._directory / "copies")
        return Result("PASS", totals={"committed": 1}, logs=[LogRead.of(log)])

    def run(self, windows: int = 1) -> list[dict[str, Any]]:
        """Watch for some windows; the lines but for those of windows."""
        said: list[dict[str, Any]] = []
        self._now += 60
        watch = Watch(
            self._audit, Plan(BEGIN_US, 0, 1, 1), self._directory / "state", window_seconds=1, emit=said.append,
            clock=lambda: self._now,
        )  # fmt: skip
        with contextlib.closing(watch):
            watch.run(threading.Event(), windows)
        assert {line["verdict"] for line in said if line["kind"] == "window"} <= {"PASS", "FINDINGS"}
        return [line for line in said if line["kind"] != "window"]

    def store(self, do: Callable[[LogStore], Any]) -> None:
        """Do something with the log as its server does."""

        async def run() -> None:
            now_us = self.made.at(COUNT)
            store = LogStore(self.log, retention_us=1, clock=lambda: now_us, segment_bytes=SEGMENT_BYTES)
            await store.open(now_us)
            await do(store)
            await store.close()

        asyncio.run(run())


@pytest.fixture
def watched(sound: Made, tmp_path: Path) -> Watched:
    watched = Watched(sound, tmp_path)
    assert len(watched.segments()) > 4 and watched.run() == []
    return watched


def gone(watched: Watched) -> None:
    watched.segments()[1].unlink()


def first_gone(watched: Watched) -> None:
    watched.segments()[0].unlink()


def several_gone(watched: Watched) -> None:
    for path in watched.segments()[1:3]:
        path.unlink()


def cut(watched: Watched) -> None:
    os.truncate(watched.segments()[1], SEGMENT_BYTES // 2)


def end_cut(watched: Watched) -> None:
    last = watched.segments()[-1]
    os.truncate(last, last.stat().st_size // 2)


def exchanged(watched: Watched) -> None:
    """For the segment of a log that was recreated: it is sound, and has the same messages."""
    other = watched.log.parent / "other"
    make_log(Made(other, COUNT, BEGIN_US + SECOND, STEP_US), SEGMENT_BYTES)
    shutil.copy(other / watched.segments()[0].name, watched.segments()[0])


def changed(watched: Watched) -> None:
    """One byte of a payload, while size and time stay as they were."""
    path = watched.segments()[1]
    state = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def begun_anew(watched: Watched) -> None:
    """The file of the last segment holds nothing but its header."""
    os.truncate(watched.segments()[-1], 64)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (gone, "is gone: and no record says that retention dropped it"),
        (first_gone, "is gone"),
        (several_gone, "2 segments, the first"),
        (cut, "was cut"),
        (end_cut, "was cut"),
        (begun_anew, "was cut"),
        (exchanged, "was exchanged"),
        (changed, "it was written as"),
    ],
)
def test_a_segment_that_is_not_as_it_was_is_said_once(
    watched: Watched, harm: Callable[[Watched], None], words: str
) -> None:
    harm(watched)
    (said,) = watched.run()
    assert (said["kind"], said["finding"], said["log"]) == ("finding", "CORRUPT", "queue") and words in said["detail"]
    assert watched.run(2) == [], "once"


def test_a_segment_that_is_harmed_again_is_said_again(watched: Watched) -> None:
    kept = watched.segments()[1].read_bytes()
    keys = set()
    for _ in range(2):
        gone(watched)
        keys |= {line["key"] for line in watched.run()}
        (watched.log / sorted(path.name for path in watched.older.glob("*.log"))[1]).write_bytes(kept)
        assert watched.run() == [], "it is there again"
    assert len(keys) == 2


def test_an_older_copy_of_the_whole_log_is_said(watched: Watched) -> None:
    async def more(store: LogStore) -> None:
        at_us = watched.made.at(COUNT)
        message = NewMessage("order.1", payload_of(1), "k1")
        await store.put([NewTransaction(transaction_id(COUNT, at_us), "orders", [message], committed=True)], at_us)

    watched.store(more)
    assert watched.run() == [], "a log grows"
    shutil.rmtree(watched.log)
    shutil.copytree(watched.older, watched.log)
    (said,) = watched.run()
    assert "it is shorter than what was read" in said["detail"]


def test_segments_lost_with_a_disk_do_not_count_as_damage(watched: Watched) -> None:
    """The log was restored from its shipped segments: an audit names what it lacks (LOST, FORGOTTEN)."""
    *_, unshipped = watched.segments()
    unshipped.unlink()
    for path in watched.log.glob("*.ckpt"):
        path.unlink()
    restored_us = int((time.time() + 3600) * 1e6)
    begin_at_the_end(Disk(watched.log), restored_us)

    async def begun() -> None:
        store = LogStore(watched.log, clock=lambda: restored_us, segment_bytes=SEGMENT_BYTES)
        await store.open(restored_us)
        await store.begin_generation(2, watched.made.at(COUNT))
        await store.close()

    asyncio.run(begun())
    assert watched.run(2) == []
    gone(watched)
    assert [line["finding"] for line in watched.run()] == ["CORRUPT"], "the others are compared as before"


def test_segments_that_retention_drops_are_not_findings(watched: Watched) -> None:
    before = len(watched.segments())
    watched.store(lambda store: store.retain(watched.made.at(COUNT)))
    assert len(watched.segments()) < before and watched.run(2) == []
