"""`make crash`: the long campaign. Prints what was done and counted, and a verdict."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
import time
from pathlib import Path

import structlog

from notify.storage.log.disk import Disk
from notify.storage.log.recovery import Damage, walk
from notify.storage.log.segments import Segment
from notify.testing import forked
from notify.testing.process import ServerProcess
from tests.crash import fair, held, loop_device, ordered, strace
from tests.crash.dropping import WHILE_DROPPING, killed_at
from tests.crash.kills import UNDER_LOAD, Kills
from tests.crash.log_faults import last_frames, lose_power_repeatedly, write_log
from tests.support.verdict import command_line, concluded, judged
from tools.bench import delayed

FLIP_BYTES = 64 << 10


def kills(cycles: int, seed: int) -> str:
    """kill -9 at random moments, then at each named point."""
    directory = Path(tempfile.mkdtemp(prefix="notify-crash-"))
    runner = Kills(directory, seed)
    try:
        for _ in range(cycles):
            asyncio.run(runner.cycle())
        for point in UNDER_LOAD:
            for count in (1, 7):
                asyncio.run(runner.cycle(f"{point}:{count}"))
        asyncio.run(runner.finish())
    finally:
        runner.kill()
        shutil.rmtree(directory, ignore_errors=True)
    a = runner.answers
    if a.violations:
        raise AssertionError("\n".join(a.violations[:20]))
    return (
        f"{runner.cycles} kills ({len(UNDER_LOAD)} named points): {len(a.stored):,} halves, "
        f"{len(a.committed):,} commits, {len(a.rolled_back):,} rollbacks, "
        f"{a.delivered:,} deliveries, {len(a.acked):,} acks, {len(a.dead):,} dead letters"
    )


def dropping() -> str:
    """kill -9 of a log that drops segments, at each named point of it."""
    with tempfile.TemporaryDirectory(prefix="notify-dropping-") as directory:
        broken = [
            violation
            for point in WHILE_DROPPING
            for count in range(1, 4)
            for violation in killed_at(Path(directory) / "log", f"{point}:{count}")
        ]
    if broken:
        raise AssertionError("\n".join(broken[:20]))
    return f"{3 * len(WHILE_DROPPING)} kills of a log that drops segments, at {len(WHILE_DROPPING)} named points"


def power(times: int, seed: int) -> str:
    """Power loss by sectors, in this process."""
    for i in range(times):
        directory = Path(tempfile.mkdtemp(prefix="notify-power-"))
        try:
            lose_power_repeatedly(directory / "log", seed * 100_000 + i, 4)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    return f"{times * 4} power losses with random subsets of unsynced 512-byte sectors"


class MemoryDisk(Disk):
    """One segment file in memory, for hundreds of thousands of flips."""

    def __init__(self, data: bytearray) -> None:
        super().__init__(Path("/nonexistent"))
        self.data = data

    def size(self, fd: int) -> int:
        return len(self.data)

    def read(self, fd: int, size: int, offset: int) -> bytes:
        return bytes(self.data[offset : offset + size])


def flips() -> str:
    """Flip every bit of a 64 KiB segment: only written frames may be read, and each flip must be noticed."""
    directory = Path(tempfile.mkdtemp(prefix="notify-flips-"))
    try:
        write_log(directory / "log", 26, seed=5)
        path, _, end = last_frames(directory / "log")
        data = bytearray(path.read_bytes()[: min(end, FLIP_BYTES)])
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    disk = MemoryDisk(data)
    segment = Segment(0, "segment", 0, 0)
    whole = {(f.base, bytes(f.body)) for f in walk(disk, segment, 0, True, [])}
    noticed = 0
    for bit in range(64 * 8, len(data) * 8):
        data[bit >> 3] ^= 1 << (bit & 7)
        damages: list[Damage] = []
        frames = [(f.base, bytes(f.body)) for f in walk(disk, segment, 0, True, damages)]
        data[bit >> 3] ^= 1 << (bit & 7)
        if not whole.issuperset(frames):
            raise AssertionError(f"bit {bit}: read what was not written")
        if not damages:
            raise AssertionError(f"bit {bit} was not noticed")
        noticed += 1
    return f"{noticed:,} single-bit flips of a segment of {len(data):,} bytes, each noticed, none read"


def main() -> int:
    options = command_line(__doc__, cycles=500, seed=None)
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    ServerProcess.launch = staticmethod(forked.launch)  # 500 starts without the imports' time
    parts = {
        "kill -9": lambda: kills(options.cycles, options.seed),
        "kill -9, dropping": dropping,
        "power loss, sectors": lambda: power(max(1, options.cycles // 5), options.seed),
        "power loss, ext4": lambda: loop_device.lose_power(max(1, options.cycles // 25), options.seed),
        "failed fdatasync": lambda: strace.fail_syncs(max(1, options.cycles // 100)),
        "bit flips": flips,
        "order": lambda: ordered.run(2_000 * options.cycles, 10_000, 4, options.cycles // 5, options.seed),
        "held keys": lambda: held.run(4 * options.cycles, 25, 4, max(1, options.cycles // 10), options.seed),
        "tenants": lambda: fair.run(
            200 * options.cycles, 99, 3, max(1, options.cycles // 100), "shared", "key", options.seed, is_timed=False
        ),
        "delayed": lambda: delayed.run(2_000 * options.cycles, 60, 15 + options.cycles / 20, 2)[1],
    }
    bad = []
    for name, part in parts.items():
        started = time.monotonic()
        try:
            result = part()
        except AssertionError as error:
            bad.append(name)
            result = f"BROKEN: {error}"
        print(f"{name}: {result} ({time.monotonic() - started:.0f} s)", flush=True)
    return concluded(bad, f"{len(bad)} of {len(parts)} parts broke a promise")


if __name__ == "__main__":
    sys.exit(judged(main))
