"""The driver of a peer's own client, in Java: compiled here, then one process that measures what it is told.

It stays the same process through a round, so that its client is as warm as the server.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
from pathlib import Path

from notify.errors import Unavailable
from notify.testing import usage
from tools.bench.peers.processes import end, last_words
from tools.bench.peers.system import Run, Step, Work, usual_steps

SOURCES = Path(__file__).parent / "java"
SCRATCH = Path(__file__).parents[3] / ".peers"
"""Jars and classes. `make clean` removes them."""
PEERS = ("RocketMq", "Kafka")
COMPILE_SECONDS = 120
START_SECONDS = 60
HEAP = "1g"
WARM_CALLERS, WARM_SECONDS = 128, 12.0
OWN_WARM_SECONDS = 1.0
"""The start of each run, which is not counted: its topic and its threads are new."""
ANSWER_SECONDS = 240
"""The longest that a run takes beside its own seconds, its verification included."""


def compiled(peer: str, jars: Path) -> Path:
    """The directory of the driver's classes for a peer. Raises Unavailable."""
    classes = SCRATCH / "classes" / peer
    classes.mkdir(parents=True, exist_ok=True)
    sources = [source for source in SOURCES.glob("*.java") if source.stem == peer or source.stem not in PEERS]
    done = subprocess.run(
        [
            "java", "-m", "jdk.compiler/com.sun.tools.javac.Main", "-nowarn", "-d", classes,
            "-cp", os.pathsep.join(map(str, jars.glob("*.jar"))), *sources,
        ],
        capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False,
    )  # fmt: skip
    if done.returncode:
        raise Unavailable(f"the driver of {peer} was not compiled: {(done.stdout + done.stderr)[-1500:]}")
    return classes


def jar_version(jars: Path, artifact: str) -> str:
    """The version in the name of a jar."""
    return next(jars.glob(f"{artifact}-*.jar")).stem.removeprefix(f"{artifact}-")


class Driver:
    """A driver's process; it ends with its input."""

    def __init__(self, peer: str, address: str, jars: Path, directory: Path, *options: str) -> None:
        """`address`: the server's, as the peer's class reads it. Raises Unavailable."""
        self._output = directory / "driver"
        classes = compiled(peer, jars)
        with self._output.open("ab") as errors:
            self._process = subprocess.Popen(
                [
                    "java", f"-Xms{HEAP}", f"-Xmx{HEAP}", f"-Duser.home={directory}", *options,
                    "-cp", f"{jars}/*{os.pathsep}{classes}", "Driver", peer, address,
                ],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
            )  # fmt: skip
        try:
            self._answer(START_SECONDS)
        except BaseException:
            self.stop()
            raise

    def ask(self, command: str, **words: object) -> dict[str, float]:
        """Have the driver measure, and return its figures. Raises Unavailable with its last words."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(" ".join([command, *(f"{key}={value}" for key, value in words.items())]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Unavailable(f"the driver has ended: {last_words(self._output)}") from None
        return self._answer(ANSWER_SECONDS)

    def _answer(self, seconds: float) -> dict[str, float]:
        """The next line. A driver that is not done in time is killed, which ends the wait for its line."""
        assert self._process.stdout is not None
        is_late = threading.Event()

        def give_up() -> None:
            is_late.set()
            self._process.kill()

        timer = threading.Timer(seconds, give_up)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line.startswith("{"):
            reason = f"was not done within {seconds:g} s" if is_late.is_set() else "failed"
            raise Unavailable(f"the driver {reason}: {line}{last_words(self._output)}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def cpu_seconds(self) -> float:
        """The CPU time of the process so far, in seconds."""
        return usage.cpu_seconds(self._process.pid)

    def stop(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):  # a command that a driver did not read as it ended
                if pipe is not None:
                    pipe.close()
        end(self._process)


class DrivenPeer:
    """A peer whose server runs, measured by its driver. Each run has topics of its own."""

    def __init__(self, driver: Driver, work: Work) -> None:
        self.driver = driver
        self._work = work
        self._runs = 0

    def _topic(self) -> str:
        self._runs += 1
        return f"bench{self._runs}"

    def warm_up(self) -> None:
        """Compilers of the server and of the driver see transactions, and then consumers."""
        self._transactions("transactions", callers=WARM_CALLERS, seconds=WARM_SECONDS)
        self._drain(self._work.fan_out // 5, 1)

    def steps(self) -> list[Step]:
        return usual_steps(self, self._work)

    def _transactions(self, command: str, **words: object) -> dict[str, float]:
        return self.driver.ask(command, topic=self._topic(), warmup=OWN_WARM_SECONDS, **words)

    def transactions(self, callers: int) -> Run:
        got = self._transactions("transactions", callers=callers, seconds=self._work.seconds)
        names = ("recorded", "visible", "settled")
        figures = {f"{name}_{callers}": got[f"{name}_per_second"] for name in names}
        return _run(figures | {f"p50_{callers}": got["p50_ms"], f"p99_{callers}": got["p99_ms"]}, got)

    def paced(self) -> Run:
        work = self._work
        got = self._transactions("paced", callers=work.paced_callers, seconds=work.seconds, rate=work.pace)
        latencies = {name: got[f"{name}_ms"] for name in ("end_to_end_p50", "end_to_end_p99")}
        return _run({"paced": got["recorded_per_second"], **latencies}, got)

    def drain(self) -> Run:
        return self._drain(self._work.pile, 1)

    def fan_out(self) -> Run:
        return self._drain(self._work.fan_out, self._work.groups)

    def _drain(self, messages: int, groups: int) -> Run:
        return self.drained(self.pile(messages), messages, groups)

    def pile(self, messages: int) -> str:
        """Store messages in a new topic, and return its name."""
        topic = self._topic()
        self.driver.ask("pile", topic=topic, messages=messages)
        return topic

    def drained(self, topic: str, messages: int, groups: int) -> Run:
        """Have so many groups handle a pile."""
        got = self.driver.ask("drain", topic=topic, messages=messages, groups=groups)
        return _run({"drain" if groups == 1 else "fan_out": got["per_second"]}, got)


def _run(figures: dict[str, float], got: dict[str, float]) -> Run:
    remarks = []
    if got.get("failed"):
        remarks.append(f"{got['failed']:,.0f} transactions failed")
    if got.get("settle_seconds", 0) > 1:
        remarks.append(f"all messages were visible {got['settle_seconds']:.1f} s after the callers stopped")
    return Run(figures, int(got["lost"]), int(got["doubled"]), "; ".join(remarks))
