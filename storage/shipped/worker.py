"""The process that ships a server's log, so that shipping takes no time of the server's event loop.

The first line of its standard input is the order, in JSON; it prints its status in lines of JSON on standard output. It
ends when its input ends, and so with the server, however that ends.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec

from notify.errors import Conflict, InvalidRequest, NotifyError
from notify.object_store.object_file import Pace
from notify.object_store.store import Store
from notify.runtime.backoff import Backoff
from notify.storage.shipped.shipper import SUPERSEDED, Shipper
from notify.storage.shipped.status import Order, Status

LOOK_SECONDS = 0.5
"""The pause between two looks for another sealed segment."""
SAY_SECONDS = 5.0
"""The longest time between two status lines; a process that is silent for much longer hangs."""
FIRST_WAIT_SECONDS, MOST_WAIT_SECONDS = 1.0, 30.0
RECORDS_SECONDS = 60.0
KEEP_SECONDS = 3600.0
"""The pause between two looks for segments that are old enough to be dropped from the store."""
LOCK_SECONDS = 10.0
LOCK = "shipping.lock"
NICENESS = 15
"""Its priority: if processors are scarce, producers and consumers come first. It then gets a thirtieth of a processor,
and falls behind until there is more."""


def main() -> None:
    """Ship until standard input ends, or the store is refused."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the server stops it by closing its input
        signal.signal(number, signal.SIG_IGN)
    order = msgspec.json.decode(_first_line(), type=Order)
    os.nice(NICENESS)
    threading.Thread(target=_end_with_input, daemon=True).start()
    _Worker(order).run()


def _first_line() -> bytes:
    line = b""
    while not line.endswith(b"\n") and (piece := os.read(0, 65_536)):
        line += piece
    return line


def _end_with_input() -> None:
    # Not sys.stdin: an interpreter that ends while a thread reads it aborts with a message on stderr.
    while os.read(0, 1024):
        pass
    os._exit(0)  # without waiting for the store: unlisted segments are shipped again


class _Worker:
    def __init__(self, order: Order) -> None:
        self._order = order
        self._standing = Status()
        self._said = Status()
        self._said_at = 0.0
        self._records_at = time.monotonic() + RECORDS_SECONDS
        self._keep_at = time.monotonic()
        self._lock = threading.Lock()

    def run(self) -> None:
        threading.Thread(target=self._say_now_and_then, daemon=True).start()
        waits = Backoff(FIRST_WAIT_SECONDS, MOST_WAIT_SECONDS)
        shipper: Shipper | None = None
        while True:
            try:
                if shipper is None:
                    shipper = self._begun()
                shipped = shipper.ship_next()
                if shipped is None:
                    self._ship_records(shipper)
                    self._drop_old(shipper)
            except (Conflict, InvalidRequest) as error:
                self._standing.refused = str(error)
                self._standing.is_superseded = error.code == SUPERSEDED
                self._say()
                return
            except (NotifyError, OSError) as error:
                self._standing.failures += 1
                self._standing.failing = str(error)[:500] or type(error).__name__
                self._say()
                # Read the manifest again, because a failed attempt may have replaced it.
                shipper = None
                time.sleep(waits.next())
                continue
            waits.reset()
            self._standing.failing = ""
            if shipped is not None:
                self._standing.shipped_bytes += shipped.end - shipped.base
                self._standing.unreadable += shipped.unreadable
            self._note(shipper)
            if shipped is None:
                time.sleep(LOOK_SECONDS)

    def _ship_records(self, shipper: Shipper) -> None:
        """Ship the administrators' records now and then, if no segment takes them along."""
        if time.monotonic() < self._records_at:
            return
        self._records_at = time.monotonic() + RECORDS_SECONDS
        shipper.ship_records()

    def _drop_old(self, shipper: Shipper) -> None:
        """Drop old segments now and then, a few files at a time, so that segments are shipped in between."""
        if not self._order.keep_seconds or time.monotonic() < self._keep_at:
            return
        self._standing.dropped += shipper.drop_old(round(self._order.keep_seconds * 1e6))
        if not shipper.remove_dropped():
            self._keep_at = time.monotonic() + KEEP_SECONDS

    def _begun(self) -> Shipper:
        data_dir = Path(self._order.data_dir)
        _take_lock(data_dir)
        store = Store(self._order.url, stall_seconds=self._order.stall_seconds, pace=Pace(self._order.bytes_per_second))
        shipper = Shipper(store, data_dir)
        shipper.begin()
        self._note(shipper)
        return shipper

    def _note(self, shipper: Shipper) -> None:
        manifest = shipper.manifest
        self._standing.listed_to = manifest.end
        self._standing.segments = manifest.count
        self._standing.shipped_us = manifest.shipped_us
        if self._standing != self._said:
            self._say()

    def _say(self) -> None:
        with self._lock:
            self._said = msgspec.structs.replace(self._standing)
            self._said_at = time.monotonic()
            sys.stdout.buffer.write(msgspec.json.encode(self._said) + b"\n")
            sys.stdout.buffer.flush()

    def _say_now_and_then(self) -> None:
        while True:
            time.sleep(SAY_SECONDS)
            if time.monotonic() - self._said_at >= SAY_SECONDS:
                self._say()


_held: list[int] = []
"""The file of the lock, open until this process ends."""


def _take_lock(data_dir: Path) -> None:
    """Lock the directory for shipping. Raises OSError if another process that ships it does not end within a while."""
    if _held:
        return
    fd = os.open(data_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            if time.monotonic() > until:
                os.close(fd)
                raise OSError(f"another process ships {data_dir}: it holds {LOCK}") from None
            time.sleep(LOOK_SECONDS)
    _held.append(fd)


if __name__ == "__main__":
    main()
