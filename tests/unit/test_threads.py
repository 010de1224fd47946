"""A part that has stopped runs nothing any more, threads included."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

import notify
from notify.runtime.threads import in_thread
from notify.server.configuration.records import Records
from notify.server.tasks import ended
from notify.server.watch.alarms import Alarms
from notify.testing import InMemoryServer

NOTIFY = Path(notify.__file__).parent
BOUND_SECONDS = 30.0


def test_a_cancelled_call_ends_with_its_thread() -> None:
    asyncio.run(_cancel_a_call())


async def _cancel_a_call() -> None:
    entered, may_end, over = threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        may_end.wait(BOUND_SECONDS)
        over.set()

    task = asyncio.create_task(in_thread(hold))
    await asyncio.to_thread(entered.wait, BOUND_SECONDS)
    ending = asyncio.ensure_future(ended(task))
    for _ in range(10):
        await asyncio.sleep(0)  # a turn of the loop: a call that does not wait for its thread ends within a few
    assert not task.done()
    may_end.set()
    await ending
    assert over.is_set()
    assert task.cancelled()


def test_an_error_of_the_thread_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_thread(divmod, 1, 0))
    assert asyncio.run(in_thread(divmod, 7, 2)) == (3, 1)


def test_a_stopped_server_reads_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found where a server's directory was removed: a thread that looked for audits opened the database again."""
    entered, may_end, over = threading.Event(), threading.Event(), threading.Event()
    stop, was_over = Alarms.stop, []

    async def released(alarms: Alarms) -> None:
        asyncio.get_running_loop().call_later(0.05, may_end.set)  # after the part has stopped, unless it waits
        await stop(alarms)
        was_over.append(over.is_set())

    def held(records: Records, most: int) -> object:
        entered.set()
        may_end.wait(BOUND_SECONDS)
        answer = read(records, most)
        over.set()
        return answer

    read = Records.audits
    monkeypatch.setattr(Records, "audits", held)
    monkeypatch.setattr(Alarms, "stop", released)
    with InMemoryServer(alarm_every_seconds=0.01) as server:
        assert entered.wait(BOUND_SECONDS)
        directory = Path(server._directory.name)
    assert was_over == [True]
    assert not directory.exists()


@pytest.mark.parametrize("part", ["server", "movers", "bridge"])
def test_no_part_leaves_a_thread_that_nobody_waits_for(part: str) -> None:
    left = [path.name for path in (NOTIFY / part).rglob("*.py") if "asyncio.to_thread(" in path.read_text()]
    # The thread that reads a binlog ahead uses a connection of its own, and ends by itself.
    assert set(left) <= {"read_ahead.py"}, "use notify.runtime.threads.in_thread"
