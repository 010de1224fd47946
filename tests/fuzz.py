"""The long form of test_bad_input: CASES requests made from the OpenAPI document, with access off and on; no 5xx."""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, given, settings

from notify.testing.process import ServerProcess
from tests.support.verdict import command_line, concluded, judged

FULL = 507
"""A request may be refused because the disk is full: that is no error of the server."""


def fuzz(server: ServerProcess, cases: int, token: str) -> tuple[Counter[int], list[str]]:
    """Answers by status, and the requests that made the server fail."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    schema = schemathesis.openapi.from_url(server.url + "/openapi.json", headers=headers)
    operations = [result.ok() for result in schema.get_all_operations()]
    statuses: Counter[int] = Counter()
    failed: list[str] = []
    session = requests.Session()
    each = -(-cases * 4 // (3 * len(operations)))  # operations with few possible requests make fewer
    for operation in operations:

        @settings(max_examples=each, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            if isinstance(case.body, dict) and "wait" in case.body:
                case.body["wait"] = 0
            answer = case.call(session=session, timeout=60, headers=headers)
            statuses[answer.status_code] += 1
            if answer.status_code >= 500 and answer.status_code != FULL:
                failed.append(f"{case.method} {case.formatted_path}: {answer.status_code} {answer.text[:200]}")

        check()
    return statuses, failed


def main() -> int:
    cases = command_line(__doc__, cases=20_000).cases
    failed: list[str] = []
    total = 0
    for access in ("0", "1"):
        with tempfile.TemporaryDirectory() as directory:
            data = Path(directory) / "data"
            server = ServerProcess(data, environment={"NOTIFY_ACCESS": access}).start()
            try:
                token = (data / "admin.token").read_text().strip() if access == "1" else ""
                statuses, wrong = fuzz(server, cases // 2, token)
            finally:
                server.stop()
        print(f"access {'on' if access == '1' else 'off'}: {dict(sorted(statuses.items()))}", flush=True)
        total += statuses.total()
        failed += wrong
    return concluded(failed[:20], f"{total} requests, {len(failed)} server errors")


if __name__ == "__main__":
    sys.exit(judged(main))
