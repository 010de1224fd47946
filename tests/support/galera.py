"""A cluster of two nodes of Galera on this machine's loopback."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pymysql
import pytest

from notify.testing.mariadb_server import MariaDbServer
from notify.testing.ports import free_port
from tests.support.clock import eventually
from tests.support.own_server import own_server

_PROVIDERS = [Path("/usr/lib/galera/libgalera_smm.so"), Path("/usr/lib/libgalera_smm.so")]


class GaleraCluster:
    """Two nodes with the same data; every database made later is on both."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._groups = [free_port(), free_port()]
        self.nodes: list[MariaDbServer] = []

    def start(self) -> GaleraCluster:
        """Skips the test with the reason if Galera is not installed."""
        provider = next((path for path in _PROVIDERS if path.exists()), None)
        if provider is None:
            pytest.skip("no Galera: Debian's package galera-4 is not installed")
        first, second = self._directory / "1", self._directory / "2"
        first.mkdir()
        MariaDbServer(first, durable=False).create().stop()
        founder = self._node(provider, 0, ["--wsrep-new-cluster"])
        founder.start()
        founder.stop()  # its data then says which cluster it belongs to, and a copy needs no transfer of the state
        shutil.copytree(first, second)
        # Even then a program of root hands over the position, as the user nobody.
        for place in (self._directory, second, second / "data"):
            place.chmod(0o777)
        with ExitStack() as unless_ready:
            unless_ready.callback(self.stop)
            for at in (0, 1):
                node = self._node(provider, at, [] if at else ["--wsrep-new-cluster"])
                self.nodes.append(node)
                node.start()
            eventually(lambda: state(self.nodes[0], "wsrep_cluster_size") == "2", "the nodes to meet")
            unless_ready.pop_all()
        return self

    def _node(self, provider: Path, at: int, options: Sequence[str]) -> MariaDbServer:
        port = self._groups[at]
        settings = [
            "--wsrep-on=ON", f"--wsrep-provider={provider}", "--innodb-autoinc-lock-mode=2",
            f"--wsrep-cluster-address=gcomm://127.0.0.1:{self._groups[0]},127.0.0.1:{self._groups[1]}",
            "--wsrep-node-address=127.0.0.1", f"--wsrep-sst-receive-address=127.0.0.1:{free_port()}",
            f"--wsrep-provider-options=base_host=127.0.0.1;base_port={port};gcache.size=16M;"
            f"gmcast.listen_addr=tcp://127.0.0.1:{port};ist.recv_addr=127.0.0.1:{free_port()}",
        ]  # fmt: skip
        return MariaDbServer(self._directory / str(at + 1), at + 1, [*settings, *options], durable=False)

    def stop(self) -> None:
        with ExitStack() as stack:
            for node in self.nodes:
                stack.callback(node.kill)


def told(node: MariaDbServer, statement: str) -> list[tuple[Any, ...]]:
    """The rows of a SHOW or SET: a node that is cut off takes no other statement, which SQLAlchemy begins with."""
    with (
        pymysql.connect(
            host="127.0.0.1", port=node.port, user=node.USER, password="shop", autocommit=True
        ) as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute(statement)
        return list(cursor.fetchall())


def state(node: MariaDbServer, name: str) -> str:
    """A status variable of a node."""
    return str(told(node, f"SHOW GLOBAL STATUS LIKE '{name}'")[0][1])


@contextmanager
def galera_cluster() -> Iterator[GaleraCluster]:
    with own_server("galera", lambda directory: GaleraCluster(directory).start()) as cluster:
        yield cluster
