"""A watch over made-up audits, in a process of its own that dies at each of its named points, again and again.

It needs no Spark, so that a hundred deaths take minutes. Run as `python -m tests.audit.killed_watch STATE ALARM_URL`
it is the watch; `complaints` runs it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from contextlib import closing
from pathlib import Path

from notify.spark.result import Found, Plan, Result
from notify.spark.watch import watching
from notify.spark.watch.lines import Lines
from notify.storage.crash_point import WATCH_POINTS
from tests.support.receiver import Receiver

BEGIN_US = 1_700_000_000_000_000
SECOND_US = 1_000_000
WINDOWS = 60
DEATHS = 3
"""So often it dies at a point; then it continues to the end."""
FILE_BYTES = 1500


def _audit(plan: Plan) -> Result:
    """Two lost messages in each window."""
    lost = [Found("LOST", f"m{at_us}", at_us=at_us) for at_us in range(plan.from_us, plan.to_us, SECOND_US // 2)]
    return Result("FINDINGS", found=lost, totals={"committed": 100})


def _watch(state: Path, alarm_url: str) -> None:
    watching.Lines = lambda ledger: Lines(ledger, FILE_BYTES, 1000)  # type: ignore[misc, assignment]
    with closing(watching.Watch(_audit, Plan(BEGIN_US, 0, 1, 1), state, window_seconds=1, alarm_url=alarm_url)) as w:
        done = (w.position.next_us - BEGIN_US) // SECOND_US
        w.run(threading.Event(), max(1, WINDOWS - done))


def complaints() -> list[str]:
    """All that went wrong."""
    return [text for point in WATCH_POINTS for text in _complaints_of(point)]


def _complaints_of(point: str) -> list[str]:
    with closing(Receiver()) as receiver, tempfile.TemporaryDirectory(prefix="notify-watch-") as directory:
        command = [sys.executable, "-m", "tests.audit.killed_watch", directory, receiver.url]
        deaths = 0
        for n in range(DEATHS + 1):
            # A start is reached once in each process; the others die somewhat later each time.
            crash_at = f"{point}:{1 if point == 'watch.at_start' else n + 2}" if n < DEATHS else ""
            done = subprocess.run(
                command, env=os.environ | {"NOTIFY_CRASH_AT": crash_at}, stderr=subprocess.PIPE, text=True, check=False
            )
            if done.returncode not in (0, -9):
                return [f"{point}: the watch ended with {done.returncode}: {done.stderr[-500:]}"]
            deaths += done.returncode != 0
        lines = [
            json.loads(line)
            for path in Path(directory).glob("findings*.jsonl")
            for line in path.read_text().splitlines()
        ]
        said = Counter(line["key"] for line in lines if line["kind"] == "finding")
        alarms = Counter(receiver.alarm_keys())
        print(f"{point}: {deaths} deaths, {len(said)} findings, {alarms.total()} alarms", flush=True)
        wrong = []
        if deaths < DEATHS:
            wrong.append(f"{point}: the watch died {deaths} times only")
        if len(said) < 2 * WINDOWS or max(said.values()) > 1:
            wrong.append(f"{point}: {len(said)} findings of {2 * WINDOWS}, most often {said.most_common(1)}")
        again = alarms.total() - len(alarms)
        if set(alarms) != set(said) or again > (deaths if point == "watch.after_alarm" else 0):
            wrong.append(f"{point}: {len(alarms)} of {len(said)} findings were alarmed, {again} of them again")
        return wrong


if __name__ == "__main__":
    _watch(Path(sys.argv[1]), sys.argv[2])
