"""The Spark session of an audit: on this machine, or on a cluster if a master is given."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyspark
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

from notify.errors import Unavailable
from notify.runtime.maven import fetched
from notify.runtime.urls import without_secrets

POM = Path(__file__).parent / "jars" / "pom.xml"
MEMORY = "3g"
PARTITIONS = 16
"""The number of shuffle partitions; one partition of 5 million messages is in memory at a time."""

LISTING_TASKS = 8
"""In how many tasks Spark lists the files that it will read."""

_PLANNING = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": str(PARTITIONS),
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # A cluster, or a server of Spark Connect, may have other values of these. Rows that cannot be read would be left
    # out without an error, so that their messages are lost, or findings about them are missing.
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.ansi.enabled": "true",
    "spark.sql.caseSensitive": "false",
    # Tables of messages must be sorted or hashed, and never broadcast by mistake.
    "spark.sql.autoBroadcastJoinThreshold": str(16 << 20),
    "spark.sql.files.maxPartitionBytes": str(64 << 20),
    # A shipped log has a small copy for each minute. By default Spark runs a task for each file to find it before every
    # read, and reads at most 16 files in one task.
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": str(LISTING_TASKS),
    "spark.sql.files.openCostInBytes": str(1 << 20),
}
"""Settings that each session may choose, also on a server of Spark Connect."""

_OF_CLIENTS = ("SPARK_REMOTE", "PYSPARK_SUBMIT_ARGS")
"""Variables of programs with a session of their own, such as notebooks: they may contradict an audit's master."""
_OF_INSTALLATIONS = ("SPARK_", "PYSPARK_", "HADOOP_", "YARN_")
"""How variables of installations and of programs that Spark runs begin."""
_KEPT = ("SPARK_HOME", "SPARK_LOCAL_DIRS")
"""Those of them that count for a Spark on this machine."""

_ALONE = {
    # Spark gives up an executor that was silent for 2 minutes, and here that is its own process, after a machine slept,
    # a container was frozen, or a clock was set: Java ended by itself.
    "spark.storage.blockManagerHeartbeatTimeoutMs": "30d",
}
"""Settings of a Spark within one process."""

SMALL_BYTES = 64 << 20
"""An audit of smaller logs ends before the optimising compiler of the JVM pays off."""
_COMPILED = "-XX:-DontCompileHugeMethods"
"""By default the JVM only interprets methods above 8,000 bytes; Spark makes one of all conditions of an audit."""
_SMALL = {
    # Only the quick compiler, and no concurrent garbage collection: half the CPU time.
    "spark.driver.extraJavaOptions": f"{_COMPILED} -XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:MetaspaceSize=256m",
    # Each task first clears a page of memory; the default is 64 MB.
    "spark.buffer.pageSize": "2m",
}
"""Settings for small inputs, where most of the time passes before the first row is read."""


def drivers() -> list[Path]:
    """The jars of the JDBC drivers: in NOTIFY_AUDIT_JARS, or fetched by Maven once. Raises Unavailable."""
    directory = Path(os.environ.get("NOTIFY_AUDIT_JARS") or Path(sys.prefix) / "notify-jdbc")
    return sorted(
        fetched(POM, directory, "*.jar", "JDBC drivers (or name their directory: NOTIFY_AUDIT_JARS)").glob("*.jar")
    )


def open_session(
    master: str = "", memory: str = MEMORY, *, databases: bool = True, small: bool = False
) -> SparkSession:
    """A session for an audit. Raises Unavailable if Java or the JDBC drivers are missing.

    `master`: Spark's master, by default `local[*]`; or the address of a Spark Connect server, `sc://host:port`, which
    has its own settings for memory and drivers. `memory`: of the driver's JVM and of each executor. `databases`:
    whether the audit reads databases. `small`: whether the inputs are small, see `_SMALL`.
    """
    if master.startswith("sc://"):
        return _connected(master)
    _check_surroundings()
    settings = {
        "spark.driver.memory": memory,
        "spark.executor.memory": memory,
        "spark.driver.extraJavaOptions": _COMPILED,
        "spark.executor.extraJavaOptions": _COMPILED,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        # By default Spark records for its errors the line of each call that makes a column. This takes more than half
        # of all calls to the JVM, and 40 % of the CPU time of a small audit.
        "spark.python.sql.dataFrameDebugging.enabled": "false",
        "spark.sql.dataFrameQueryContext.enabled": "false",
        # Spark keeps past jobs for its web page, which is off here; a watch runs a hundred jobs a minute.
        "spark.ui.retainedJobs": "20",
        "spark.ui.retainedStages": "20",
        "spark.ui.retainedTasks": "200",
        "spark.sql.ui.retainedExecutions": "5",
        "spark.executorEnv.PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }
    if not master:
        settings |= _ALONE
    settings |= _PLANNING
    if small:
        settings |= _SMALL
    if databases:
        jars = [jar.absolute() for jar in drivers()]
        if master:
            settings["spark.jars"] = ",".join(jar.as_uri() for jar in jars)  # a path may have commas
        else:  # Spark reads brackets and percent signs in a list of jars as patterns and codes
            settings["spark.driver.extraClassPath"] = os.pathsep.join(map(str, jars))
    # Java has a directory of its own for temporary files, and does not ask whether it can be used.
    settings["spark.driver.extraJavaOptions"] += f' "-Djava.io.tmpdir={_temporary_directory()}"'
    children_before = _children()
    try:
        with _own_environment(is_local=not master):
            builder = SparkSession.builder.appName("notify-audit").master(master or "local[*]")
            for name, value in settings.items():
                builder = builder.config(name, value)
            return builder.getOrCreate()
    except BaseException as error:
        why = cause_of(error)  # only the JVM knows, which ends now
        # A JVM that is interrupted while it starts waits forever, even after this process has ended.
        for child in _children() - children_before:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        if isinstance(error, PySparkRuntimeError) and "JAVA_GATEWAY_EXITED" in str(error):
            raise Unavailable(
                "Java ended before Spark had started, and said why on standard error: perhaps it is older than 17, or "
                f"has no room for --memory {memory}"
            ) from error
        if isinstance(error, Py4JError):
            raise Unavailable(f"Spark does not start: {why}") from None
        raise


def cause_of(error: BaseException) -> str:
    """The innermost cause that an error of Spark's names."""
    try:
        text = str(error)
    except Py4JError:  # the JVM has ended, and it alone knew
        return "Java ended"
    lines = [line.strip().removeprefix(": ") for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith(_OF_A_CALL):
        del lines[0]
    causes = [line.removeprefix(_CAUSE) for line in lines if line.startswith(_CAUSE)]
    return (causes[-1] if causes else lines[0] if lines else repr(error))[:500]


_OF_A_CALL, _CAUSE = "An error occurred while calling ", "Caused by: "
"""How Py4J begins an error of Java's, whose next line says what it is; and how Java begins the cause of another one."""


@contextmanager
def _own_environment(*, is_local: bool) -> Iterator[None]:
    """Within this context the environment names no other installation of Spark or Hadoop.

    Its variables may name listeners, extensions, file systems, addresses and a Java process that are not here, or
    another master, and Spark would not start, or would not find the files of this machine. With a master they count:
    they may say how to reach it.
    """
    own = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}  # of the workers, too
    if is_local:
        own |= {"SPARK_CONF_DIR": str(POM.parent), "SPARK_LOCAL_IP": "127.0.0.1"}  # the directory has no settings
    else:
        own["SPARK_LOCAL_IP"] = os.environ.get("SPARK_LOCAL_IP", "127.0.0.1")
    others = _OF_INSTALLATIONS if is_local else ()
    found = {name for name in os.environ if name.startswith(others) and name not in _KEPT}
    saved = {name: os.environ.get(name) for name in {*found, *_OF_CLIENTS, *own}}
    for name in saved:
        os.environ.pop(name, None)
    os.environ.update(own)
    try:
        yield
    finally:
        for name, value in saved.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _temporary_directory() -> str:
    """A directory for temporary files. Raises Unavailable if Spark cannot use it, or SPARK_LOCAL_DIRS."""
    given = [part.strip() for part in os.environ.get("SPARK_LOCAL_DIRS", "").split(",") if part.strip()]
    why = [_unusable(Path(directory)) for directory in given]
    if given and all(why):
        raise Unavailable(
            f"SPARK_LOCAL_DIRS is {','.join(given)}, where Spark cannot keep temporary files ({why[0]}): name a "
            "directory with some GB of room, or unset it"
        )
    directory = tempfile.gettempdir()
    if os.statvfs(directory).f_flag & os.ST_NOEXEC:
        raise Unavailable(
            f"{directory} is mounted with noexec, so that Java cannot load what it unpacks there: name another "
            "directory for temporary files, as TMPDIR"
        )
    return directory


def _unusable(directory: Path) -> str:
    """Why no file can be made in a directory, which is made if it is missing; "" if one can."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(1 << 16))
    except OSError as error:
        return error.strerror or repr(error)
    return ""


def _check_surroundings() -> None:
    """Raises Unavailable for what Spark would refuse by a long trace of Java's, or by none."""
    java_home, spark_home = os.environ.get("JAVA_HOME"), os.environ.get("SPARK_HOME")
    if java_home and shutil.which(str(Path(java_home, "bin", "java"))) is None:
        raise Unavailable(f"JAVA_HOME is {java_home}, where no bin/java is: correct it, or unset it")
    if not java_home and shutil.which("java") is None:
        raise Unavailable("the audit runs on Spark, which needs Java 17 or newer: install it or set JAVA_HOME")
    if spark_home and not any(Path(spark_home).glob(f"jars/spark-core_*-{pyspark.__version__}*.jar")):
        raise Unavailable(
            f"SPARK_HOME is {spark_home}, where no Spark {pyspark.__version__} is, the version of pyspark here: unset "
            "it, or install its version of pyspark"
        )
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        raise Unavailable(
            f"Spark does not run for a user without a name: add uid {os.getuid()} to /etc/passwd (in a container: of "
            "its image, or when it starts), or run the audit as another user"
        ) from None


def _connected(address: str) -> SparkSession:
    """A session of a Spark Connect server. Raises Unavailable."""
    try:
        session = SparkSession.builder.remote(address).getOrCreate()
        for name, value in _PLANNING.items():
            session.conf.set(name, value)
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("pyspark", "grpc"):
            raise
        reason = without_secrets(" ".join(str(error).split()))[:300]
        raise Unavailable(
            f"{without_secrets(address)}: {reason}; is a Spark Connect server there, and `pip install "
            "'notify-tx[connect]'` done here?"
        ) from error
    return session


def _children() -> set[int]:
    """The running child processes of this process; empty if the system does not list them."""
    listed: set[int] = set()
    for thread in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            listed |= set(map(int, thread.read_text().split()))
    return listed
