"""Compares an audit on a standalone Spark cluster with two workers and on this machine.

Run as `python -m tests.audit.cluster`. With `--store` the log is read from an S3 server, and an empty file system lies
over the directory of log and report in each worker: they share no path with the audit, nor with each other.
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

from notify.spark.audit import Audit
from notify.spark.inputs.databases import Database
from notify.spark.inputs.log_input import LogInput
from notify.spark.report.files import plain
from notify.spark.result import Inputs
from notify.spark.session import open_session
from notify.testing.databases import postgresql
from notify.testing.ports import free_ports
from tests.audit.campaign import LEDGER, WITH_EFFECTS, planted
from tests.support.clock import eventually
from tests.support.object_store import s3_server
from tests.support.shipping import sealed_copy, ship_directory
from tests.support.verdict import command_line, concluded, judged
from tools.bench.made_run import made_run

HIDING = 'mount -t tmpfs none "$0" && exec "$@"'


@contextlib.contextmanager
def cluster(directory: Path, hidden: Path | None = None) -> Iterator[str]:
    """Start a master and two workers with a core each; yields the master's URL. `hidden`: a directory of which workers
    see nothing."""
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
        for number, command in enumerate(commands):
            full = [str(home / "bin" / "spark-class"), *command]
            if number and hidden is not None:
                full = ["unshare", "--mount", "sh", "-c", HIDING, str(hidden), *full]
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


def compared(url: str, directory: Path, transactions: int, store: str = "") -> list[str]:
    """Run both audits, and return their differences. `store`: where the cluster reads the log, and keeps its copies;
    "": the directory of the log."""
    # Small segments, so that a short run has several; as a server makes them for a long one.
    made = made_run(directory, url, transactions, segment_bytes=4 << 20 if transactions < 1_000_000 else 256 << 20)
    planted(made, url, directory / "faulty", 20)
    place, scratch = str(directory / "faulty"), str(directory / "report" / "segments")
    if store:
        place, scratch = f"{store}/log", f"{store}/copies"
        ship_directory(sealed_copy(directory / "faulty", directory / "sealed"), place)
    spark = open_session()
    with contextlib.closing(Database(url, "shop")) as database:
        inputs = Inputs([database], [LogInput(directory / "faulty", "log")])
        local_result = plain(Audit(spark, WITH_EFFECTS, inputs, directory / "scratch").run())
    spark.stop()
    with (
        tempfile.TemporaryDirectory(prefix="notify-spark-") as work,
        cluster(Path(work), directory if store else None) as master,
    ):
        done = subprocess.run(
            [
                sys.executable, "-m", "notify.cli.main", "audit", "run", "--json", "--database", f"shop={url}",
                "--log", f"log={place}", "--report", str(directory / "report"), "--scratch", scratch,
                "--master", master, "--memory", "1g", "--effects", LEDGER, "--max-transaction-seconds", "5",
                "--deliver-seconds", "5",
            ],
            capture_output=True, text=True, timeout=3600, check=False,
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
    said = command_line(__doc__, store=False, transactions=50_000)
    directory = Path(tempfile.mkdtemp(prefix="notify-audit-"))
    directory.chmod(0o755)
    try:
        with postgresql() as url, contextlib.ExitStack() as stack:
            store = stack.enter_context(s3_server()).url if said.store else ""
            complaints = compared(url, directory, said.transactions, store)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    what = "two workers that share no path, from an S3 server," if said.store else "two workers"
    return concluded(complaints, f"an audit on {what} says the same as on this machine")


if __name__ == "__main__":
    sys.exit(judged(main))
