"""The Spark session of an audit: on this machine by default, on a cluster where a master is named."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from notify.errors import Unavailable
from notify.maven import fetched

POM = Path(__file__).parent / "jars" / "pom.xml"
MEMORY = "3g"
PARTITIONS = 16
"""Partitions of a shuffle: one of them, a part of 5 million messages, is in memory at a time."""

SMALL_BYTES = 64 << 20
"""An audit of logs up to this size is over before thorough compilation pays."""
_SMALL = {
    # One compiler that is quick instead of two, and no threads that collect garbage meanwhile: half the CPU time.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:MetaspaceSize=256m",
    # Each task clears a page of memory first: of 64 MB otherwise.
    "spark.buffer.pageSize": "2m",
}
"""Settings for small inputs: most of the time goes by before the first row is read."""


def drivers() -> list[Path]:
    """The JDBC drivers' jars, of NOTIFY_AUDIT_JARS or fetched by Maven once. Raises Unavailable with the reason."""
    directory = Path(os.environ.get("NOTIFY_AUDIT_JARS") or Path(sys.prefix) / "notify-jdbc")
    return sorted(
        fetched(POM, directory, "*.jar", "JDBC drivers (or name their directory: NOTIFY_AUDIT_JARS)").glob("*.jar")
    )


def open_session(
    master: str = "", memory: str = MEMORY, *, databases: bool = True, small: bool = False
) -> SparkSession:
    """A session with what an audit needs. Raises Unavailable where Java or the drivers are missing.

    `master`: Spark's, default `local[*]`. `memory`: of the driver's JVM; an executor of a cluster takes as much.
    `small`: the inputs are, see `_SMALL`.
    """
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        raise Unavailable("the audit runs on Spark, which needs Java 17 or newer: install it or set JAVA_HOME")
    # Workers are this interpreter, and must not be slowed down or misled by what the shell says.
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    settings = {
        "spark.driver.memory": memory,
        "spark.executor.memory": memory,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": str(PARTITIONS),
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        # Millions of messages are sorted or hashed, never broadcast by mistake.
        "spark.sql.autoBroadcastJoinThreshold": str(16 << 20),
        "spark.sql.files.maxPartitionBytes": str(64 << 20),
        "spark.log.level": "ERROR",
        # Past jobs that a page would show, which is off: a watch runs a hundred a minute.
        "spark.ui.retainedJobs": "20",
        "spark.ui.retainedStages": "20",
        "spark.ui.retainedTasks": "200",
        "spark.sql.ui.retainedExecutions": "5",
        "spark.executorEnv.PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }
    if small:
        settings |= _SMALL
    if databases:
        settings["spark.jars"] = ",".join(map(str, drivers()))
    builder = SparkSession.builder.appName("notify-audit").master(master or "local[*]")
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()
