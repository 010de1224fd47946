"""Runs `notify audit run` as a separate process and measures it.

Every half second it measures the memory of the JVM and of the Python processes (the command and Spark's workers).
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from notify.testing.usage import resident_by_program

_LOOK_SECONDS = 0.5


def measured_audit(
    databases: Mapping[str, str], logs: Sequence[Path], report: Path, flags: Sequence[str] = ()
) -> dict[str, Any]:
    """The figures of an audit that must pass: seconds, peak memory in MiB, and the seconds of each step.

    Raises RuntimeError if the audit does not pass.
    """
    command = [
        sys.executable, "-m", "notify.cli.main", "audit", "run", "--json", "--report", str(report),
        "--max-transaction-seconds", "5", "--deliver-seconds", "5", *flags,
    ]  # fmt: skip
    for name, url in databases.items():
        command += ["--database", f"{name}={url}"]
    for log in logs:
        command += ["--log", str(log)]
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    peaks = {"jvm_peak_mb": 0.0, "python_peak_mb": 0.0}
    done = threading.Event()

    def look() -> None:
        while not done.wait(_LOOK_SECONDS):
            resident = resident_by_program(process.pid)
            jvm = resident.pop("java", 0.0)
            peaks["jvm_peak_mb"] = max(peaks["jvm_peak_mb"], jvm)
            peaks["python_peak_mb"] = max(peaks["python_peak_mb"], sum(resident.values()))

    watching = threading.Thread(target=look)
    watching.start()
    out, _ = process.communicate()
    done.set()
    watching.join()
    result = json.loads(out)
    if result.get("verdict") != "PASS":
        raise RuntimeError(f"the audit of a sound run did not pass: {out[:2000]}")
    return {
        "transactions": result["totals"]["committed"],
        "seconds": round(time.monotonic() - started, 1),
        "audit_seconds": result["seconds"],
        **{name: round(peak) for name, peak in peaks.items()},
        "steps": result["steps"],
    }
