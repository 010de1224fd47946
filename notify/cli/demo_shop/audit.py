"""The audit of a demo: `notify audit run --json` on its databases and queues."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from notify.cli.demo_shop.shop import GROUP
from notify.cli.demo_shop.topology import Topology
from notify.errors import NotifyError

AUDIT_SECONDS = 1800.0


def audited(topology: Topology, shop: str, effects: str, report: Path) -> dict[str, Any]:
    """Run the audit, write its report to the directory `report`, and return its result.

    Raises NotifyError if the audit cannot run.
    """
    databases = {"shop": shop} | ({"points": effects} if effects != shop else {})
    owner = "points" if "points" in databases else "shop"
    command = [sys.executable, "-m", "notify.cli.main", "audit", "run", "--json", *topology.audit_flags()]
    command += [flag for name, url in databases.items() for flag in ("--database", f"{name}={url}")]
    command += ["--effects", f"{owner}:SELECT message_id, '{GROUP}' AS consumer_group FROM points"]
    # The shop has been idle for a while, so no transaction is still running.
    command += ["--max-transaction-seconds", "2", "--deliver-seconds", "2", "--bucket-seconds", "1"]
    command += ["--report", str(report)]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=AUDIT_SECONDS)
    try:
        result: dict[str, Any] = json.loads(process.stdout)
    except ValueError:
        last_line = "".join(process.stderr.strip().splitlines()[-1:])
        raise NotifyError(f"the audit could not run: {last_line}") from None
    return result
