"""Where an audit runs: paths with signs, and settings of other installations of Spark and Hadoop."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from notify.spark.inputs.columns import CHECKS
from notify.spark.inputs.copies import LocalCopies, copy_name
from notify.spark.inputs.log_files import SegmentFile
from notify.spark.session import drivers

NOWHERE = "hdfs://127.0.0.1:1"
ODD = "[re]{po,rt} 50%20 #1 ü"
STARTS = """
import sys
from notify.spark.inputs.databases import Database
from notify.spark.session import open_session

spark = open_session(memory="1g", small=True)
(row,) = Database(sys.argv[1], "shop").read_query(spark, "(SELECT 7 AS value) q", "value long").collect()
print("read", row.value, "below", spark._jvm.java.lang.System.getProperty("java.io.tmpdir"))
"""
STANDS_STILL = """
import os, signal, time
from notify.spark.session import _children, open_session

spark = open_session(memory="1g", databases=False, small=True)
(java,) = _children()
os.kill(java, signal.SIGSTOP)
time.sleep(15)  # longer than the timeout that the test sets
os.kill(java, signal.SIGCONT)
for _ in range(5):
    time.sleep(1)  # for a heartbeat
    print(spark.range(10).count())
"""
SETTINGS = """
spark.master yarn
spark.submit.deployMode cluster
spark.api.mode connect
spark.extraListeners com.example.Missing
spark.sql.extensions com.example.Missing
spark.eventLog.enabled true
spark.eventLog.dir hdfs://127.0.0.1:1/events
"""
LENIENT = """
spark.sql.files.ignoreCorruptFiles true
spark.sql.files.ignoreMissingFiles true
spark.sql.ansi.enabled false
"""
READS = """
import sys
from pathlib import Path
from notify.spark.inputs.columns import CHECKS
from notify.spark.inputs.copies import LocalCopies
from notify.spark.inputs.log_files import SegmentFile
from notify.spark.session import open_session

spark = open_session("local[1]", "1g", databases=False, small=True)
copies = LocalCopies(Path(sys.argv[1]))
print("read", copies.rows(spark, "checks", CHECKS, [(SegmentFile("0.log", 0, 1, 100, 100, 1), 1)]).collect())
"""


def test_copies_are_read_at_a_path_with_signs_though_hadoop_names_another_file_system(
    spark: Any, tmp_path: Path
) -> None:
    """Spark takes brackets for a pattern (SPARK-32810), and a path without a scheme for one of `fs.defaultFS`."""
    copies, segment = LocalCopies(tmp_path / (ODD + "*?\\n")), SegmentFile("0.log", 0, 1, 100, 100, 1)
    copy = copies.directory / copy_name(segment)
    copy.mkdir(parents=True)
    row = {"id": b"i" * 16, "answered": 1, "parked": False, "at_us": 5}
    pq.write_table(pa.Table.from_pylist([row], CHECKS), copy / "checks.parquet")
    hadoop = spark.sparkContext._jsc.hadoopConfiguration()
    before = hadoop.get("fs.defaultFS")
    hadoop.set("fs.defaultFS", NOWHERE)
    try:
        (read,) = copies.rows(spark, "checks", CHECKS, [(segment, 1)]).collect()
    finally:
        hadoop.set("fs.defaultFS", before)
    assert read["at_us"] == 5


@pytest.mark.long
def test_an_audit_starts_where_other_installations_are_configured(tmp_path: Path) -> None:
    """A notebook's or a cluster's machine: Spark did not start, and said that Java was too old."""
    jars, spark, hadoop = tmp_path / f"{ODD}, jars", tmp_path / "spark", tmp_path / "hadoop"
    (temporary := tmp_path / "its own").mkdir()
    shutil.copytree(drivers()[0].parent, jars)
    spark.mkdir()
    (spark / "spark-defaults.conf").write_text(SETTINGS)
    hadoop.mkdir()
    site = f"<configuration><property><name>fs.defaultFS</name><value>{NOWHERE}</value></property></configuration>"
    (hadoop / "core-site.xml").write_text(site)
    environment = {
        "SPARK_CONF_DIR": str(spark), "HADOOP_CONF_DIR": str(hadoop), "NOTIFY_AUDIT_JARS": str(jars),
        "SPARK_REMOTE": "sc://127.0.0.1:1", "PYSPARK_SUBMIT_ARGS": "--master yarn pyspark-shell",
        "SPARK_LOCAL_IP": "192.0.2.1", "SPARK_LOCAL_HOSTNAME": "none.invalid", "PYSPARK_GATEWAY_PORT": "1",
        "SPARK_SUBMIT_OPTS": "-Dspark.extraListeners=com.example.Missing", "TMPDIR": str(temporary),
    }  # fmt: skip
    line = [sys.executable, "-c", STARTS, f"sqlite:///{tmp_path}/shop.db"]
    ended = subprocess.run(line, env=os.environ | environment, capture_output=True, text=True)
    assert ended.stdout == f"read 7 below {temporary}\n", ended.stderr[:1500]


@pytest.mark.long
def test_a_spark_that_stood_still_goes_on() -> None:
    """As on a machine that slept: its executor, which is the same process, counted as lost, and Java ended."""
    options = "-Dspark.network.timeout=10s -Dspark.executor.heartbeatInterval=1s -Dspark.network.timeoutInterval=1s"
    environment = os.environ | {"JAVA_TOOL_OPTIONS": f"{options} -Dspark.executor.heartbeat.maxFailures=3"}
    ended = subprocess.run([sys.executable, "-c", STANDS_STILL], env=environment, capture_output=True, text=True)
    assert ended.stdout == "10\n" * 5, ended.stderr[-1500:]


@pytest.mark.long
def test_what_java_says_when_spark_does_not_start_is_told(tmp_path: Path) -> None:
    """It was asked for when Java was gone: a trace of Python's, and no reason."""
    line = [sys.executable, "-c", STARTS.replace("1g", "100m"), f"sqlite:///{tmp_path}/shop.db"]
    ended = subprocess.run(line, capture_output=True, text=True, check=False)
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("notify.errors.Unavailable: Spark does not start: ") and "must be at least" in last


@pytest.mark.long
def test_a_copy_that_cannot_be_read_fails_an_audit_though_a_cluster_is_lenient(tmp_path: Path) -> None:
    """Its messages were left out without a word."""
    copy = tmp_path / "copies" / copy_name(SegmentFile("0.log", 0, 1, 100, 100, 1))
    copy.mkdir(parents=True)
    (copy / "checks.parquet").write_bytes(b"PAR1, and nothing of Parquet")
    (tmp_path / "spark-defaults.conf").write_text(LENIENT)
    line = [sys.executable, "-c", READS, str(tmp_path / "copies")]
    environment = os.environ | {"SPARK_CONF_DIR": str(tmp_path)}
    ended = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and ended.stdout == "", ended.stdout
    assert "checks.parquet" in ended.stderr
