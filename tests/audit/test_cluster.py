"""On a standalone Spark cluster with two workers an audit says the same as on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from notify.demo.kafka import free_ports
from spark.report.files import plain
from tests.audit.campaign import PLAN, audited, made_run, planted
from tests.conftest import empty_database


@contextlib.contextmanager
def cluster(directory: Path) -> Iterator[str]:
    """A master and two workers with a core each; the master's URL."""
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
        deadline = time.monotonic() + 60
        while len(re.findall("Successfully registered with master", (directory / "output").read_text())) < 2:
            assert time.monotonic() < deadline, (directory / "output").read_text()[-1000:]
            time.sleep(0.2)
        yield f"spark://127.0.0.1:{port}"
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)
        output.close()


def test_the_result_is_the_same(spark: Any, database_urls: dict[str, str], tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with empty_database("postgresql", database_urls, tmp_path) as url:
        made = made_run(tmp_path, url, 12_000, segment_bytes=2 << 20)
        planted(made, url, tmp_path / "faulty", 6)
        here = plain(audited(spark, url, tmp_path / "faulty", tmp_path / "scratch"))
        (tmp_path / "cluster").mkdir()
        with cluster(tmp_path / "cluster") as master:
            done = subprocess.run(
                [
                    sys.executable, "-m", "notify.cli.main", "audit", "run", "--json", "--database", f"shop={url}",
                    "--log", str(tmp_path / "faulty"), "--report", str(tmp_path / "report"), "--master", master,
                    "--memory", "1g", "--effects", PLAN.effects[0][1], "--max-transaction-seconds", "5",
                    "--deliver-seconds", "5",
                ],
                capture_output=True, text=True, timeout=200, check=False,
            )  # fmt: skip
    assert done.returncode == 1, done.stderr[-2000:]
    there = json.loads(done.stdout)
    assert there["counts"] == here["counts"] and here["counts"]["LOST"] == 6
    for name in ("verdict", "totals", "notes", "reasons", "not_checked"):
        assert there[name] == here[name], name

    def found(result: dict[str, Any]) -> list[tuple[str, str]]:
        return sorted((f["key"], json.dumps(f["evidence"], sort_keys=True)) for f in result["findings"])

    assert found(there) == found(here)
