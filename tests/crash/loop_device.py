"""Power loss on a real ext4: a loop-mounted image, the shutdown ioctl without flushing, remount, check."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import random
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

from notify.errors import StorageFailed
from notify.storage.log import LogStore
from tests.crash.workload import T0, History, run_until_failure, violations
from tests.support.clock import eventually_async

EXT4_IOC_SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = 2


class NotPossible(Exception):
    """Why this machine cannot do it."""


def lose_power(times: int, seed: int) -> str:
    """So many power losses; what was done, or why it could not be."""
    try:
        return _run(times, seed)
    except NotPossible as reason:
        return f"SKIPPED: {reason}"


def _command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NotPossible(f"{' '.join(words[:2])}: {done.stderr.strip()[:200]}")


def _unmount(mounted: Path) -> None:
    """A store that was closed keeps nothing of the file system. Raises AssertionError naming what it does."""
    kept = {str(Path(fd).readlink()) for fd in _paths("/proc/self/fd") if os.path.islink(fd)}
    kept |= {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    _check([f"still open after close: {path}" for path in kept if path.startswith(str(mounted))])
    _command("umount", str(mounted))


def _paths(directory: str) -> list[str]:
    return [os.path.join(directory, name) for name in os.listdir(directory)]


def _run(times: int, seed: int) -> str:
    if os.geteuid() != 0:
        raise NotPossible("mounting needs root")
    for program in ("mkfs.ext4", "mount", "umount"):
        if shutil.which(program) is None:
            raise NotPossible(f"there is no {program}")
    directory = Path(tempfile.mkdtemp(prefix="notify-ext4-"))
    image, mounted = directory / "image", directory / "mounted"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(256 << 20)
    history = History()
    chance = random.Random(seed)
    try:
        _command("mkfs.ext4", "-q", "-F", str(image))
        for _ in range(times):
            _command("mount", "-o", "loop", str(image), str(mounted))
            try:
                asyncio.run(_until_shutdown(mounted, history, chance))
            finally:
                _unmount(mounted)
        _command("mount", "-o", "loop", str(image), str(mounted))
        try:
            _check(asyncio.run(_recovered(mounted, history)))
        finally:
            _unmount(mounted)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return f"{times} shutdowns of a mounted ext4 under load, {len(history.halves):,} acknowledged halves all there"


async def _until_shutdown(mounted: Path, history: History, chance: random.Random) -> None:
    store = LogStore(mounted / "log", segment_bytes=1 << 18)
    await store.open(T0)
    _check(await violations(store, history))
    history.power_is_lost = False
    losing = asyncio.ensure_future(_shut_down(mounted, history, len(history.halves) + chance.randint(1, 100)))
    await run_until_failure(store, history, chance, 1_000_000)
    await losing
    with contextlib.suppress(StorageFailed):  # the power may be lost only now
        await store.close()


async def _shut_down(mounted: Path, history: History, halves: int) -> None:
    """At any moment once so many halves were acknowledged.

    A sync that runs beside the ioctl may return as if it had been done (seen on Linux 6.18: 7 of 500); without
    power it would not return at all.
    """
    await eventually_async(lambda: len(history.halves) >= halves, f"{halves} acknowledged halves")
    history.power_is_lost = True
    fd = os.open(mounted, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, EXT4_IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
    except OSError as error:
        raise NotPossible(f"this kernel refuses the ext4 shutdown ioctl: {error.strerror}") from error
    finally:
        os.close(fd)


async def _recovered(mounted: Path, history: History) -> list[str]:
    history.power_is_lost = False
    store = LogStore(mounted / "log")
    await store.open(T0)
    broken = await violations(store, history)
    await store.close()
    return broken


def _check(broken: list[str]) -> None:
    if broken:
        raise AssertionError("\n".join(broken[:20]))
