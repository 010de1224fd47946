"""The processes of the peers: each runs in a session of its own and is ended by its id."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from notify.errors import Unavailable

STOP_SECONDS = 20.0
LOOK_SECONDS = 0.1
LAST_WORDS = 1500


def start(words: Sequence[str | Path], output: Path, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a server, which writes to a file."""
    with output.open("ab") as opened:
        return subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=opened, stderr=opened, text=True, env=environment,
            start_new_session=True,
        )  # fmt: skip


def end(process: subprocess.Popen[str]) -> None:
    """Stop a process, with SIGKILL where it does not stop by itself."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_SECONDS)


def wait_for_port(process: subprocess.Popen[str], port: int, output: Path, seconds: float = 60) -> None:
    """Wait until a server takes connections. Raises Unavailable with its last words."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(LOOK_SECONDS)
    raise Unavailable(f"nothing listens on port {port}: {last_words(output)}")


def last_words(output: Path) -> str:
    """The end of what a process wrote."""
    return output.read_text(errors="replace")[-LAST_WORDS:].strip() if output.exists() else ""
