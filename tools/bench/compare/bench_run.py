"""One run of a bench in a tree, as a process: its figures, or why there are none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.bench.compare import checkout

STOP_SECONDS = 60.0
"""How long an interrupted run may take to stop its server."""
LAST_WORDS = 2000


class RunFailed(Exception):
    """A run failed; `str()` is one line that says why."""

    word = "INCONCLUSIVE"


class Lost(RunFailed):
    """A run lost or doubled messages."""

    word = "FAIL"


def run_bench(words: Sequence[str], tree: Path, seconds: float) -> dict[str, Any]:
    """Run a bench that prints JSON; interrupt it after so many seconds. Raises RunFailed, Lost."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A background job of a shell ignores SIGINT, and its children would, too; but the bench must be interruptible.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        words,
        cwd=tree,
        env=checkout.environment(tree),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=seconds)
    except BaseException as reason:
        _end(process)
        if isinstance(reason, subprocess.TimeoutExpired):
            raise RunFailed(f"it was not done after {seconds:g} s") from None
        raise
    result = _result(output)
    if result is None or (process.returncode and not _wrong(result)):
        print((errors or output)[-LAST_WORDS:], file=sys.stderr)
        raise RunFailed(f"it failed with exit code {process.returncode}; its last words are above")
    if _wrong(result):
        raise Lost(f"it lost {result.get('lost')} and doubled {result.get('duplicated')}")
    return result


def _wrong(result: dict[str, Any]) -> bool:
    return bool(result.get("lost") or result.get("duplicated"))


def _result(output: str) -> dict[str, Any] | None:
    try:
        result = json.loads(output)
    except ValueError:
        return None
    return result if isinstance(result, dict) else None


def _end(process: subprocess.Popen[str]) -> None:
    """Interrupted, a bench stops its server, which has a session of its own; its other processes share this one."""
    try:
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=STOP_SECONDS)
    except ProcessLookupError:
        process.communicate(timeout=STOP_SECONDS)
