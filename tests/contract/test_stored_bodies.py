"""A storage knows which stored bodies its messages name, whatever their state."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from notify.protocol import ids
from notify.protocol.large_bodies import PLACE, STORED, Reference
from notify.protocol.wire import Payload, encode_msgpack
from notify.storage.capabilities import NamesBodies
from notify.storage.log import mentions
from notify.storage.log.disk import Disk
from notify.storage.log.segments import Segment
from notify.storage.records import NewMessage, NewTransaction, State
from tests.contract.stores import SECOND, T0, Bench, Scenario

Runner = Callable[[Scenario], None]
HOUR = 3600 * SECOND


def name_of(number: int) -> str:
    return f"notify-bodies/g/half/{uuid.UUID(int=number)}"


def naming(number: int, **options: int) -> NewTransaction:
    """A transaction whose message names a stored body."""
    body = Reference("s3://bucket/x", name_of(number), 5, "0" * 64).encoded()
    message = NewMessage("t", encode_msgpack(Payload("t", body, headers={PLACE: STORED})), **options)
    return NewTransaction(ids.new_id(), "g", [message])


async def named(bench: Bench) -> set[str]:
    found: set[str] = set()
    after = ""
    assert isinstance(bench.store, NamesBodies)
    while True:
        some, after = await bench.store.stored_bodies(after)
        found |= some
        if not after:
            return found


async def _named_in_each_state(bench: Bench) -> None:
    assert await named(bench) == set()
    halves = [naming(n) for n in range(4)]
    delayed = naming(4, delay_us=HOUR)
    await bench.store.put([*halves, delayed], T0)
    first, second, third, _ = halves
    await bench.store.decide([(t.id, "g", State.COMMITTED) for t in (first, second, delayed)], T0)
    await bench.store.decide([(third.id, "g", State.ROLLED_BACK)], T0)
    wanted = {name_of(n) for n in (0, 1, 3, 4)}
    assert await named(bench) >= wanted
    await bench.restart()
    assert await named(bench) >= wanted
    plain = NewTransaction(ids.new_id(), "g", [NewMessage("t", encode_msgpack(Payload("t", b"plain")))])
    await bench.store.put([plain], T0)
    assert await named(bench) <= {name_of(n) for n in range(5)}


def test_named_in_each_state(transactions: Runner) -> None:
    transactions(_named_in_each_state)


def test_a_name_across_the_border_of_two_parts_is_found(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that lies across the border of two parts is found, too."""
    monkeypatch.setattr(mentions, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(mentions, "PAGE_BYTES", 4096)

    async def scenario(bench: Bench) -> None:
        await bench.store.put([naming(n) for n in range(500)], T0)
        assert await named(bench) == {name_of(n) for n in range(500)}

    run(scenario)


def test_in_what_recovery_has_set_aside(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is no segment any more, and the end of a log that was torn: somebody may still read them."""
    monkeypatch.setattr(mentions, "CHUNK_BYTES", 4096)

    async def scenario(bench: Bench) -> None:
        await bench.store.put([naming(1)], T0)
        if bench.kind != "memory":
            across = bytes(4096 - 10) + name_of(2).encode() + bytes(100) + name_of(3).encode()
            (bench.directory / f"{1 << 40:020d}.log").write_bytes(across)
            await bench.restart()
            (bench.directory / f"{4096:020d}.torn").write_bytes(name_of(4).encode())
            assert await named(bench) == {name_of(n) for n in (1, 2, 3, 4)}

    run(scenario)


def test_a_segment_that_is_dropped_meanwhile_has_another_part_read(tmp_path: Path) -> None:
    """Retention carries what is needed to the end of the log, which may be behind the end that was looked for."""
    disk = Disk(tmp_path)
    (tmp_path / "1.log").write_bytes(name_of(1).encode())
    segments = [Segment(0, "0.log", 0, 0), Segment(100, "1.log", 0, 0)]
    end = 100 + len(name_of(1))
    assert mentions.search(disk, segments, 0, end) == (set(), 100)
    assert mentions.search(disk, segments, 100, end) == ({name_of(1)}, end)
