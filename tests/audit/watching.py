"""A watch beside a running shop says and alarms every planted fault once, wherever in its code it is killed.

Run as `python -m tests.audit.watching --windows 60`. First a watch over made-up audits dies at each of its named points
(killed_watch.py). Then a shop places orders in PostgreSQL, something goes wrong in it in every window (faulty_shop.py),
and twice a whole table is unreachable, so that nothing can be judged. The watch's files of lines are renamed after a
few lines, and the receiver of its alarms is unreachable, refuses, or takes an alarm without an answer. The watch dies
once at each named point; then it runs to the end in one life, in which memory and disk must not grow. The server is
killed once.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from notify.storage.crash_point import COPY_POINTS, WATCH_POINTS
from notify.testing.databases import postgresql
from notify.testing.process import ServerProcess
from tests.audit import killed_watch
from tests.audit.faulty_shop import Bank, FaultyShop
from tests.audit.shop import Shop
from tests.audit.watch_of_small_files import FILE_BYTES, KEPT_FILES
from tests.audit.watch_process import LONGEST_SECONDS, WatchProcess
from tests.support.clock import eventually
from tests.support.databases import empty_database
from tests.support.receiver import Receiver
from tests.support.verdict import command_line, concluded, judged

WINDOW_SECONDS = 8
CLOSES_SECONDS = 10
"""So long after its end a window is audited; until then a fault may be planted in several steps."""
CALM_WINDOWS = 24
"""At least so many windows are in the last life of the watch: memory and disk are compared within it."""
FAULTS_A_WINDOW, MOST_WAITING = 2, 60
GROWN = 1.3
"""The last ten windows may use so many times the memory and disk of the first ten, and the slack below."""
MEMORY_SLACK_MB, DISK_SLACK = 64, 256 << 10
POINTS = (*WATCH_POINTS, *COPY_POINTS)
OF_AN_OUTAGE = {"UNDELIVERED", "IN_DOUBT"}
"""Classes that may be true while the server is unreachable, though nobody planted them."""


@dataclass
class Sample:
    """Memory and disk of the watch at a window of its last life."""

    python_mb: float
    whole_mb: float
    disk: dict[str, int]


@dataclass
class Campaign:
    """One run, and what it saw."""

    watch: WatchProcess
    shop: FaultyShop
    bank: Bank
    server: ServerProcess
    receiver: Receiver
    kills: Counter[str] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
    episodes: int = 0
    """How often a table was unreachable."""
    plants: bool = True
    """Faults are planted: not while the server is unreachable, which their messages need."""
    complaints: list[str] = field(default_factory=list)
    _seen: int = 0

    def in_each_window(self) -> None:
        """Plant faults, and let the receiver fail now and then, once in the time of each window, audited or not yet."""
        self.watch.collect()
        now = int(time.time() / WINDOW_SECONDS)
        if now == self._seen:
            return
        self._seen = now
        for _ in range(FAULTS_A_WINDOW):
            if self.plants and len(self.not_alarmed()) < MOST_WAITING:  # a watch on a slow machine catches up first
                self.shop.plant()
        windows, turn = self.watch.windows(), now % 10
        self.receiver.status = 503 if turn == 3 else 204
        self.receiver.refuses = "GHOST" if turn == 5 else ""
        self.receiver.swallows = turn == 7
        print(f"{windows} windows, {len(self.shop.planted)} planted, {len(self.receiver.taken)} alarms", flush=True)

    def die_everywhere(self) -> None:
        """One life for each named point, up to there."""
        for number, point in enumerate(POINTS):
            self.watch.start(f"{point}:1")
            code = self.watch.wait_until_dead(self.in_each_window)
            self.kills[point] += code == -9
            if code != -9:
                self.complaints.append(f"{point}: the watch ended with {code}")
            print(f"died at {point}", flush=True)
            if number == len(POINTS) // 2:
                self.watch.start()
                self._hide_rows()
                self.watch.kill()

    def live(self, windows: int) -> None:
        """The last life, until so many windows were audited in all."""
        self.watch.start()
        begun = self.watch.windows()
        last = max(windows, begun + CALM_WINDOWS)
        print(f"the last life begins after {begun} windows, and ends after {last}", flush=True)
        hidden = killed = False
        while (done := self.watch.windows()) < last:
            self._next_window(done)
            disk, (python, whole) = self.watch.disk_bytes(), self.watch.memory_mb()
            self.samples.append(Sample(python, whole, disk))
            if not hidden and done > begun + CALM_WINDOWS // 3:
                hidden = True
                self._hide_rows()
            if not killed and done > begun + CALM_WINDOWS * 2 // 3:
                killed = True
                self.plants = False
                self.server.kill()
                self._next_window(self.watch.windows())
                self.server.start()
                self.plants = True
        self.receiver.status, self.receiver.refuses, self.receiver.swallows = 204, "", False

        def are_all_alarmed() -> bool:
            self.watch.collect()
            return not self.not_alarmed()

        eventually(are_all_alarmed, "every fault to be alarmed", LONGEST_SECONDS)
        if (code := self.watch.stop()) != 0:
            self.complaints.append(f"the watch ended with {code}, not with 0")

    def _next_window(self, after: int) -> None:
        def is_next() -> bool:
            assert self.watch.is_running, "the watch has ended"
            self.in_each_window()
            return self.watch.windows() > after

        eventually(is_next, "the next window", LONGEST_SECONDS)

    def _hide_rows(self) -> None:
        """Let the bank's rows be unreachable until the watch says that it cannot judge."""
        self.episodes += 1
        self.bank.pay()
        self.bank.hide_rows()
        try:

            def is_said() -> bool:
                self.in_each_window()
                return len(self._inconclusive()) >= self.episodes

            eventually(is_said, "an alarm that nothing can be judged", LONGEST_SECONDS)
        finally:
            self.bank.show_rows()

    # --- judging ----------------------------------------------------------------------------------------------

    def _inconclusive(self) -> set[str]:
        """The keys of alarms that a window cannot be judged; looks at earlier windows have their own."""
        keys = {body["key"] for body in list(self.receiver.taken) if body["kind"] == "inconclusive"}
        return {key for key in keys if not key.startswith("AGAIN:")}

    def not_alarmed(self) -> list[str]:
        keys = set(self.receiver.alarm_keys())
        return [
            f"{fault.finding} {fault.subject}"
            for fault in self.shop.planted
            if not any(fault.is_in(key) for key in keys)
        ]

    def judge(self) -> None:
        """Compare lines and alarms with what was planted, and the last ten windows with the first ten."""
        lines = self.watch.all_lines()
        said = Counter(line["key"] for line in lines if line["kind"] == "finding")
        alarms = Counter(body["key"] for body in self.receiver.taken if body["kind"] == "finding")
        planted = {key for key in said | alarms if any(fault.is_in(key) for fault in self.shop.planted)}
        others = {key for key in said | alarms if key not in planted}
        by_class = Counter(fault.finding for fault in self.shop.planted)
        print(f"planted: {dict(by_class)}")
        again = sum(count - 1 for count in alarms.values())
        print(f"{len(self.shop.planted)} planted, {len(said)} said, {len(alarms)} alarmed, {again} alarms repeated")
        self._expect(not self.not_alarmed(), f"not alarmed: {self.not_alarmed()[:3]}")
        self._expect(set(alarms) == set(said), f"said and alarmed differ: {sorted(set(alarms) ^ set(said))[:3]}")
        self._expect(max(said.values(), default=0) == 1, f"said again: {said.most_common(1)}")
        wrong = {key for key in others if key.partition(":")[0] not in OF_AN_OUTAGE}
        self._expect(not wrong, f"findings that nobody planted: {sorted(wrong)[:3]}")
        if others:
            print(f"while the server was away: {len(others)} findings")
        bodies: dict[str, set[str]] = {}
        for body in self.receiver.taken:
            bodies.setdefault(body["key"], set()).add(repr(sorted(body.items())))
        names = {body["key"]: name for body, name in zip(self.receiver.taken, self.receiver.names, strict=True)}
        self._expect(all(len(one) == 1 for one in bodies.values()), "an alarm was repeated with another body")
        self._expect(len(set(names.values())) == len(names), "two alarms have the same idempotency key")
        may_repeat = self.kills["watch.after_alarm"] + self.receiver.swallowed
        self._expect(again <= may_repeat, f"{again} alarms were repeated, {may_repeat} may have been")
        said_of_windows = self._inconclusive()
        reasons = {body["key"]: body["detail"] for body in self.receiver.taken if body["key"] in said_of_windows}
        self._expect(
            len(reasons) == self.episodes, f"{self.episodes} tables were unreachable, {len(reasons)} alarms say so"
        )
        self._expect(
            all("bank: half_message" in text for text in reasons.values()), f"reasons: {sorted(reasons.values())}"
        )
        self._expect(self.watch.renamed > KEPT_FILES, f"only {self.watch.renamed} files of lines were renamed")
        self._judge_windows()
        self._judge_growth()

    def _judge_windows(self) -> None:
        windows = sorted({line["window_us"] for line in self.watch.lines if line["kind"] == "window"})
        # The line of a window is only printed: a watch that dies behind its commit does not print it.
        left_out = (windows[-1] - windows[0]) // (WINDOW_SECONDS * 1_000_000) + 1 - len(windows)
        self._expect(left_out <= self.kills.total() + 1, f"{left_out} windows were left out")
        failures = [line["detail"] for line in self.watch.lines if line["kind"] == "failure"]
        print(f"{len(windows)} windows, {len(failures)} failed attempts {failures[:2]}")

    def _judge_growth(self) -> None:
        first, last = self.samples[:10], self.samples[-10:]
        for name in ("python_mb", "whole_mb"):
            a, b = (median(getattr(s, name) for s in part) for part in (first, last))
            print(f"{name}: {a:.0f} MB in the first ten windows of the last life, {b:.0f} MB in the last ten")
            self._expect(b <= a * GROWN + MEMORY_SLACK_MB, f"{name} has grown from {a:.0f} to {b:.0f}")
        for name in first[0].disk:
            a, b = (median(s.disk[name] for s in part) for part in (first, last))
            print(f"disk, {name}: {a / 1024:.0f} KiB in the first ten windows, {b / 1024:.0f} KiB in the last")
            if name != "copies":  # these grow with the log
                self._expect(b <= a * GROWN + DISK_SLACK, f"{name} on disk has grown from {a} to {b} bytes")
        most = (KEPT_FILES + 2) * 4 * FILE_BYTES + (1 << 20)
        state = max(s.disk["state"] for s in self.samples)
        self._expect(state <= most, f"the state had {state} bytes, more than {most}")

    def _expect(self, condition: bool, complaint: str) -> None:
        if not condition:
            self.complaints.append(complaint)


def main() -> int:
    windows = command_line(__doc__, windows=60).windows
    complaints = killed_watch.complaints()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="notify-watch-")))
        url = stack.enter_context(postgresql(durable=False))
        bank_url = stack.enter_context(empty_database("postgresql", {"postgresql": url}, directory))
        server = ServerProcess(directory / "data", environment={"NOTIFY_SEGMENT_BYTES": str(1 << 20)}).start()
        stack.callback(server.stop)
        receiver = stack.enter_context(closing(Receiver()))
        flags = [
            "--database", f"shop={url}", "--database", f"bank={bank_url}", "--log", str(server.data_dir),
            "--window-seconds", str(WINDOW_SECONDS), "--max-transaction-seconds", "2",
            "--deliver-seconds", str(CLOSES_SECONDS), "--alarm-url", receiver.url,
            # Faults are planted from now on, and the watch dies before it has noted where it begins.
            "--from", datetime.now(UTC).isoformat(),
        ]  # fmt: skip
        watch = WatchProcess(flags, directory / "state", directory / "spark")
        stack.callback(watch.kill)
        shop = stack.enter_context(closing(Shop(url, server.url)))
        bank = stack.enter_context(closing(Bank(bank_url, server.url)))
        faulty = FaultyShop(shop, server.url)
        run = Campaign(watch, faulty, bank, server, receiver)
        with shop.busy(pause_seconds=0.05):
            faulty.open()
            bank.pay()
            run.die_everywhere()
            run.live(windows)
        run.judge()
        complaints += run.complaints
    kills = ", ".join(f"{point} {count}" for point, count in run.kills.items())
    print(f"kills: {kills}; the server 1")
    return concluded(
        complaints,
        f"{watch.windows()} windows, {run.kills.total()} kills at {len(POINTS)} points, {len(faulty.planted)} faults, "
        f"{run.episodes} tables away",
    )


if __name__ == "__main__":
    sys.exit(judged(main))
