"""Apache Kafka brokers (KRaft) on loopback, for tests and `make cluster-demo KAFKA=1`."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from notify.errors import Unavailable
from notify.runtime.maven import fetched
from notify.testing.ports import free_ports

POM = Path(__file__).parents[1] / "tests" / "kafka" / "pom.xml"
CLUSTER_ID = "5L6g3nShT-eMCtK--X86sw"
QUICK = ("-Xms320m", "-Xmx1g", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto")
"""Most brokers here run only for minutes, too short for optimised compilation and concurrent collection to pay off.
With thousands of topics, as a whole matrix makes them, 320 MB were full, and the node no longer answered."""


def jars() -> Path:
    """The directory of Kafka's jars, which Maven fetches once. Raises Unavailable with the reason."""
    directory = Path(os.environ.get("NOTIFY_KAFKA_LIB") or POM.parents[2] / ".venv" / "kafka")
    return fetched(POM, directory, "kafka_2.13-*.jar", "Kafka")


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """Settings of nodes in addition to the settings below, or in place of them.

    `listener`: a further listener, as `NAME://127.0.0.1:9093`. `users`: passwords by name, for SASL SCRAM-SHA-512.
    `java`: the options of the virtual machine.
    """

    settings: Mapping[str, object] = field(default_factory=dict)
    listener: str = ""
    users: Mapping[str, str] = field(default_factory=dict)
    java: Sequence[str] = QUICK


class KafkaCluster:
    """A cluster of nodes, each a broker and controller, which may be killed and started again."""

    def __init__(
        self,
        directory: Path,
        nodes: int = 1,
        advertised: Callable[[int], int] = int,
        node_settings: NodeSettings = NodeSettings(),
    ) -> None:
        """`advertised`: returns, for the port of a broker, the port that clients use, for example that of a proxy.
        Raises Unavailable if Kafka's jars are missing."""
        self._classpath = f"{jars()}/*"
        self._directory = directory
        self._ports = free_ports(2 * nodes)
        self.nodes = nodes
        self._advertised = advertised
        self._extra = node_settings
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        for node in range(nodes):
            self._configure(node)

    @property
    def brokers(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self._ports[: self.nodes])

    @property
    def url(self) -> str:
        return f"kafka://{self.brokers}"

    def data_directory(self, node: int) -> Path:
        """The directory of a node's partitions; each has a directory `{topic}-{partition}` in it."""
        return self._directory / f"kafka-{node}" / "data"

    def _configure(self, node: int) -> None:
        broker, controller = self._ports[node], self._ports[self.nodes + node]
        voters = ",".join(f"{n + 1}@127.0.0.1:{self._ports[self.nodes + n]}" for n in range(self.nodes))
        copies = min(3, self.nodes)
        directory = self._directory / f"kafka-{node}"
        directory.mkdir(parents=True)
        more = f",{self._extra.listener}" if self._extra.listener else ""
        settings: dict[str, object] = {
            "process.roles": "broker,controller",
            "node.id": node + 1,
            "controller.quorum.voters": voters,
            "listeners": f"PLAINTEXT://127.0.0.1:{broker},CONTROLLER://127.0.0.1:{controller}{more}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{self._advertised(broker)}{more}",
            "controller.listener.names": "CONTROLLER",
            "log.dirs": directory / "data",
            "num.partitions": 4,
            "default.replication.factor": copies,
            "min.insync.replicas": max(1, copies - 1),
            "offsets.topic.replication.factor": copies,
            "offsets.topic.num.partitions": 4,
            "transaction.state.log.replication.factor": copies,
            "transaction.state.log.min.isr": max(1, copies - 1),
            "transaction.state.log.num.partitions": 4,
            "transaction.abort.timed.out.transaction.cleanup.interval.ms": 1000,
            "group.initial.rebalance.delay.ms": 0,
            "group.min.session.timeout.ms": 1000,
            "broker.session.timeout.ms": 6000,
            # A node that does not reach the controllers in time would end: too soon on a loaded machine.
            "initial.broker.registration.timeout.ms": 600_000,
            **self._extra.settings,
        }
        file = directory / "server.properties"
        file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        users = []
        for name, password in self._extra.users.items():
            users += ["--add-scram", f"SCRAM-SHA-512=[name={name},password={password}]"]
        self._java(node, "kafka.tools.StorageTool", "format", "-t", CLUSTER_ID, "-c", str(file), *users).wait(60)

    def _java(self, node: int, *arguments: str) -> subprocess.Popen[bytes]:
        with (self._directory / f"kafka-{node}" / "output").open("ab") as output:
            return subprocess.Popen(
                [
                    "java", *self._extra.java, "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp", self._classpath,
                    *arguments,
                ],
                stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    def run_tool(self, name: str, *arguments: str) -> None:
        """Run one of Kafka's commands, by the name of its class. Raises RuntimeError if it fails."""
        if self._java(0, name, "--bootstrap-server", self.brokers, *arguments).wait(60):
            raise RuntimeError(f"{name} fails: {self.last_output(0)}")

    def start_node(self, node: int) -> None:
        file = self._directory / f"kafka-{node}" / "server.properties"
        self._processes[node] = self._java(node, "kafka.Kafka", str(file))

    def start(self, seconds: float = 90) -> KafkaCluster:
        """Start all nodes and wait until they answer. Raises Unavailable."""
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        with ExitStack() as unless_ready:
            unless_ready.callback(self.stop)
            for node in range(self.nodes):
                self.start_node(node)
            deadline = time.monotonic() + seconds
            for node in range(self.nodes):
                self.wait_for_node(node, deadline - time.monotonic())
            admin = AdminClient({"bootstrap.servers": self.brokers, "log_level": 0})
            while time.monotonic() < deadline:
                try:
                    if len(admin.list_topics(timeout=5).brokers) == self.nodes:
                        unless_ready.pop_all()
                        return self
                except KafkaException:
                    pass  # the brokers do not answer yet
                time.sleep(0.3)
        raise Unavailable("Kafka did not become ready")

    def wait_for_node(self, node: int, seconds: float = 180) -> None:
        """Wait until a restarted node accepts connections; start it again if it has ended. Raises Unavailable."""
        deadline = time.monotonic() + seconds
        while not self._listens(node):
            if time.monotonic() >= deadline:
                raise Unavailable(f"Kafka does not listen on port {self._ports[node]}: {self.last_output(node)}")
            if not self.is_running(node):
                self.start_node(node)
            time.sleep(0.2)

    def _listens(self, node: int) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._ports[node])) == 0

    def kill_node(self, node: int) -> None:
        self._processes[node].kill()
        self._processes[node].wait(30)

    def is_running(self, node: int) -> bool:
        return self._processes[node].poll() is None

    def last_output(self, node: int) -> str:
        """The last lines that a node wrote."""
        return (self._directory / f"kafka-{node}" / "output").read_text(errors="replace")[-2000:]

    def signal_node(self, node: int, number: int) -> None:
        """Send a signal to a node. A SIGSTOP must be followed by a SIGCONT."""
        self._processes[node].send_signal(number)

    def stop(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(15)
