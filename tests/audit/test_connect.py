"""An audit on a server of Spark Connect, which this process reaches only by gRPC."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from notify.spark.session import drivers
from notify.testing.ports import free_port
from tests.audit.trade import SERVICES, WITH_INBOX, Trade
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.shipping import shipped

pytestmark = pytest.mark.long
LIBRARIES = ("grpc", "grpc_status", "pandas", "zstandard")


@contextlib.contextmanager
def connect_server(directory: Path) -> Iterator[str]:
    """Start a Spark Connect server with the JDBC drivers; yields its address."""
    pyspark = pytest.importorskip("pyspark")
    home, port = Path(pyspark.__file__).parent, free_port()
    environment = os.environ | {
        "SPARK_HOME": str(home), "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable,
    }  # fmt: skip
    command = [
        str(home / "bin" / "spark-submit"), "--class", "org.apache.spark.sql.connect.service.SparkConnectServer",
        "--master", "local[2]", "--driver-memory", "1500m", "--jars", ",".join(map(str, drivers())),
        "--conf", f"spark.connect.grpc.binding.port={port}", "--conf", "spark.connect.grpc.binding.address=127.0.0.1",
        "--conf", "spark.ui.enabled=false", "--conf", f"spark.local.dir={directory}",
        "--conf", f"spark.sql.warehouse.dir={directory}", "spark-internal",
    ]  # fmt: skip
    with (directory / "output").open("wb") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output, cwd=directory)
        try:
            listens = "the server to listen"
            eventually(lambda: _answers(port) or server.poll() is not None, listens, 5 * PATIENCE_SECONDS)
            assert server.poll() is None, (directory / "output").read_text()[-2000:]
            yield f"sc://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(60)


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, LIBRARIES)),
    reason="needs the extra connect: pip install 'notify-tx[connect]'",
)
def test_an_audit_on_spark_connect(trade: Trade, tmp_path: Path) -> None:
    url = shipped(trade.log, tmp_path / "shipped")
    trade.execute(WITH_INBOX, f"DELETE FROM notify_inbox WHERE message_id = '{trade.message(3)}'")
    databases = [word for name in SERVICES for word in ("--database", f"{name}={trade.url(name)}")]
    (tmp_path / "server").mkdir()
    with connect_server(tmp_path / "server") as address:
        done = subprocess.run(
            [
                sys.executable, "-m", "notify.cli.main", "audit", "run", "--json", "--master", address, *databases,
                "--log", url, "--scratch", f"file://{tmp_path}/copies", "--report", str(tmp_path / "report"),
                "--max-transaction-seconds", "5", "--deliver-seconds", "5",
            ],
            capture_output=True, text=True, timeout=5 * PATIENCE_SECONDS, check=False,
        )  # fmt: skip
    result = json.loads(done.stdout)
    assert done.returncode == 1, (result.get("failed"), done.stderr[-2000:])
    assert [(f["finding"], f["message_id"]) for f in result["findings"]] == [("ACKED_NO_EFFECT", trade.message(3))]
