"""Child processes of the benches. Each takes a JSON specification and prints one JSON object."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from notify.errors import NotifyError

LONGEST_SECONDS = 3600.0


def start(module: str, spec: dict[str, Any], *, wait_for_line: bool = False) -> subprocess.Popen[str]:
    """Start a module of the bench. With `wait_for_line`, wait until it prints its first line: it is ready."""
    child = subprocess.Popen([sys.executable, "-m", module, json.dumps(spec)], stdout=subprocess.PIPE, text=True)
    if wait_for_line:
        assert child.stdout is not None
        with ExitStack() as unless_ready:
            unless_ready.callback(end, child)
            child.stdout.readline()
            unless_ready.pop_all()
    return child


def start_load(url: str, ids: Path, *, clients: int, seconds: float, **others: Any) -> subprocess.Popen[str]:
    """Start producers, which write the acknowledged ids to the file `ids`. `others`: see notify/cli/bench/load.py."""
    spec = {
        "url": url,
        "ids": str(ids),
        "clients": clients,
        "all_clients": clients,
        "seconds": seconds,
        "body": 256,
        "topics": 16,
        "keys": 0,
        "rate": 0.0,
        "warmup": 1.0,
        "batching": True,
        "queues_outcomes": False,
    }
    return start("notify.cli.bench.load", spec | others)


def result(child: subprocess.Popen[str], seconds: float = LONGEST_SECONDS) -> dict[str, Any]:
    """Wait for the end of a child, and return its result. Raises NotifyError if the child failed."""
    try:
        output, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise NotifyError(f"a process of the bench had not ended after {seconds:g} s") from None
    finally:
        end(child)
    if child.returncode != 0:
        raise NotifyError(f"a process of the bench failed with exit code {child.returncode}")
    printed: dict[str, Any] = json.loads(output.splitlines()[-1])
    return printed


def end(child: subprocess.Popen[str]) -> None:
    """Kill a child if it still runs, because the bench was interrupted."""
    if child.poll() is None:
        child.kill()
        child.communicate()
