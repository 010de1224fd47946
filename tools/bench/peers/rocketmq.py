"""Apache RocketMQ: a name server and a broker that syncs every message to the disk before it acknowledges it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from notify.runtime.maven import fetched
from notify.testing.ports import free_port, free_ports
from tools.bench.peers import processes
from tools.bench.peers.driver import SCRATCH, DrivenPeer, Driver, jar_version
from tools.bench.peers.system import Work

POM = Path(__file__).parent / "java" / "pom.xml"
OPENED = tuple(
    f"--add-{kind}=java.base/{package}=ALL-UNNAMED"
    for kind, package in (
        ("opens", "sun.nio.ch"), ("opens", "java.nio"), ("opens", "java.lang"), ("exports", "jdk.internal.ref"),
    )
)  # fmt: skip
"""Packages of Java's own that the broker uses: Java has to open them."""
NAME_SERVER = ("-Xms256m", "-Xmx256m")
BROKER = ("-Xms2g", "-Xmx2g", "-XX:MaxDirectMemorySize=2g", "-XX:+UseG1GC")
TRANSFER = 1024
"""The most messages in one answer to a consumer. With the default of 32 RocketMQ would drain slower."""

CHECK_MS = 10_000
"""A client sends an outcome once and does not wait: the broker asks for those that it dropped under load. With the
default of 30 s a run would wait longer for them."""


class RocketMq:
    """RocketMQ as released, with its own defaults but for what is set here."""

    name = "rocketmq"
    title = "RocketMQ"

    def version(self) -> str:
        return jar_version(self._jars(), "rocketmq-broker")

    def _jars(self) -> Path:
        return fetched(POM, SCRATCH / "rocketmq", "rocketmq-broker-*.jar", "RocketMQ")

    @contextmanager
    def started(self, directory: Path, work: Work) -> Iterator[DrivenPeer]:
        name_server, replication = free_ports(2)
        broker = _broker_port()
        settings = directory / "broker.conf"
        settings.write_text(_lines(_settings(directory, name_server, broker, replication)))
        (directory / "namesrv.conf").write_text(_lines({"listenPort": name_server, "bindAddress": "127.0.0.1"}))
        with ExitStack() as stack:
            for port, kind, options in ((name_server, "namesrv", NAME_SERVER), (broker, "broker", BROKER)):
                output = directory / kind
                process = processes.start(
                    [
                        "java", *OPENED, *options, f"-Duser.home={directory}", "-cp", f"{self._jars()}/*",
                        f"org.apache.rocketmq.{kind}.{kind.capitalize()}Startup", "-c", directory / f"{kind}.conf",
                    ],
                    output, os.environ | {"ROCKETMQ_HOME": str(directory)},
                )  # fmt: skip
                stack.callback(processes.end, process)
                processes.wait_for_port(process, port, output)
            address = f"127.0.0.1:{name_server},127.0.0.1:{broker}"
            driver = Driver("RocketMq", address, self._jars(), directory, "-Drocketmq.client.logUseSlf4j=true")
            stack.callback(driver.stop)
            yield DrivenPeer(driver, work)


def _settings(directory: Path, name_server: int, broker: int, replication: int) -> dict[str, object]:
    return {
        "brokerClusterName": "bench",
        "brokerName": "bench",
        "brokerId": 0,
        "brokerRole": "ASYNC_MASTER",
        "brokerIP1": "127.0.0.1",
        "bindAddress": "127.0.0.1",
        "listenPort": broker,
        "haListenPort": replication,
        "namesrvAddr": f"127.0.0.1:{name_server}",
        "storePathRootDir": directory / "store",
        "flushDiskType": "SYNC_FLUSH",
        "transactionCheckInterval": CHECK_MS,
        "maxTransferCountOnMessageInMemory": TRANSFER,
        "maxTransferCountOnMessageInDisk": TRANSFER,
    }


def _lines(settings: dict[str, object]) -> str:
    return "".join(f"{name}={value}\n" for name, value in settings.items())


def _broker_port() -> int:
    """A port with the one two below it free as well: the broker listens on both."""
    while True:
        port = free_port()
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port - 2))
            except OSError:
                continue
        return port
