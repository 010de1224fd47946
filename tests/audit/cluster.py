"""Compares an audit on a standalone Spark cluster with two workers and on this machine.

Run as `python -m tests.audit.cluster`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from notify.bench.made_run import made_run
from notify.spark.report.files import plain
from notify.spark.session import open_session
from notify.testing.databases import postgresql
from notify.testing.ports import free_ports
from tests.audit.audited import audited
from tests.audit.campaign import LEDGER, WITH_EFFECTS, planted
from tests.support.clock import eventually


@contextlib.contextmanager
def cluster(directory: Path) -> Iterator[str]:
    """Start a master and two workers with a core each; yields the master's URL."""
    import pyspark

    home = Path(pyspark.__file__).parent
    port, *web = free_ports(4)
    environment = os.environ | {
        "SPARK_HOME": str(home), "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_WORKER_DIR": str(directory),
        "SPARK_LOG_DIR": str(directory), "PYSPARK_PYTHON": sys.executable,
    }  # fmt: skip
    deploy = "org.apache.spark.deploy"
    commands = [[f"{deploy}.master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", str(web[0])]]
    for n in (1, 2):
        worker = [
            f"{deploy}.worker.Worker",
            f"spark://127.0.0.1:{port}",
            "--host",
            "127.0.0.1",
            "-c",
            "1",
            "-m",
            "1500m",
        ]
        commands.append([*worker, "--webui-port", str(web[n])])
    processes = []
    output = (directory / "output").open("ab")
    try:
        for command in commands:
            full = [home / "bin" / "spark-class", *command]
            processes.append(
                subprocess.Popen(full, env=environment, stdout=output, stderr=output, start_new_session=True)
            )
        registered = "Successfully registered with master"
        said = directory / "output"
        try:
            eventually(lambda: len(re.findall(registered, said.read_text())) == 2, "both workers to register")
        except AssertionError as late:
            late.add_note(said.read_text()[-1000:])
            raise
        yield f"spark://127.0.0.1:{port}"
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)
        output.close()


def compared(url: str, directory: Path) -> list[str]:
    """Run both audits, and return their differences."""
    made = made_run(directory, url, 50_000, segment_bytes=4 << 20)
    planted(made, url, directory / "faulty", 20)
    spark = open_session()
    local_result = plain(audited(spark, url, directory / "faulty", directory / "scratch", WITH_EFFECTS))
    spark.stop()
    (directory / "cluster").mkdir()
    with cluster(directory / "cluster") as master:
        done = subprocess.run(
            [
                sys.executable, "-m", "notify.cli.main", "audit", "run", "--json", "--database", f"shop={url}",
                "--log", str(directory / "faulty"), "--report", str(directory / "report"), "--master", master,
                "--memory", "1g", "--effects", LEDGER, "--max-transaction-seconds", "5",
                "--deliver-seconds", "5",
            ],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    if done.returncode != 1:
        return [f"exit code {done.returncode}: {done.stderr[-2000:]}"]
    cluster_result = json.loads(done.stdout)
    complaints = [
        f"{name}: {local_result[name]} here, {cluster_result[name]} there"
        for name in ("counts", "verdict", "totals", "notes", "reasons", "not_checked")
        if cluster_result[name] != local_result[name]
    ]

    def keys_and_evidence(result: dict[str, Any]) -> list[tuple[str, str]]:
        return sorted((f["key"], json.dumps(f["evidence"], sort_keys=True)) for f in result["findings"])

    if keys_and_evidence(cluster_result) != keys_and_evidence(local_result):
        complaints.append(
            f"{len(set(keys_and_evidence(cluster_result)) ^ set(keys_and_evidence(local_result)))} findings differ"
        )
    print(
        f"here {local_result['seconds']:.0f} s, there {cluster_result['seconds']:.0f} s, "
        f"{len(local_result['findings'])} findings"
    )
    return complaints


def main() -> int:
    directory = Path(tempfile.mkdtemp(prefix="notify-audit-"))
    directory.chmod(0o755)
    try:
        with postgresql() as url:
            complaints = compared(url, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    for complaint in complaints:
        print(complaint)
    print(f"VERDICT: {'FAIL' if complaints else 'PASS'} an audit on two workers says the same as on this machine")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
