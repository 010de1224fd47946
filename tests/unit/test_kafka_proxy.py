"""The proxy that knows Kafka's frames, before a broker that notes what comes and answers it."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.kafka_proxy import Api, Fault, Head, KafkaProxy, Which


def frame(api: Api, number: int, *, commit: bool = True, version: int = 1) -> bytes:
    """A request of this kind; `number` is its correlation id."""
    body = struct.pack(">hhih2s", api, version, number, 2, b"me") + b"the-id"
    body += bytes([commit]) if api is Api.END_TXN else b""
    body += b"\0" if version >= 3 else b""
    return struct.pack(">i", len(body)) + body


def received(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := connection.recv(count - len(data))):
        data += more
    return data


class Broker:
    """Answers each request, whose number it notes."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.numbers: list[int] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            while head := received(connection, 4):
                request = received(connection, *struct.unpack(">i", head))
                number = struct.unpack_from(">i", request, 4)[0]
                self.numbers.append(number)
                connection.sendall(struct.pack(">ii", 4, number))

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


class Client:
    """One connection."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS)

    def send(self, api: Api, number: int) -> None:
        self._socket.sendall(frame(api, number))

    def asks(self, api: Api, number: int) -> bool:
        """Whether an answer came before the connection ended."""
        self.send(api, number)
        return received(self._socket, 8) == struct.pack(">ii", 4, number)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def broker() -> Iterator[Broker]:
    made = Broker()
    yield made
    made.close()


@pytest.fixture
def proxy(broker: Broker) -> Iterator[KafkaProxy]:
    with KafkaProxy("127.0.0.1", broker.port) as made:
        yield made


@pytest.fixture
def clients(proxy: KafkaProxy) -> Iterator[list[Client]]:
    made = [Client(proxy.port) for _ in range(2)]
    yield made
    for client in made:
        client.close()


END = Which(Api.END_TXN, b"the-id", commit=True)
PRODUCE = Which(Api.PRODUCE, b"the-id")


@pytest.mark.parametrize("version", [1, 3, 5])
@pytest.mark.parametrize("commit", [True, False])
def test_it_is_known_whether_a_transaction_commits(version: int, commit: bool) -> None:
    assert Head.of(frame(Api.END_TXN, 7, commit=commit, version=version)) == Head(26, version, 7, commit)
    assert Head.of(frame(Api.PRODUCE, 7, version=version)) == Head(0, version, 7)


def test_a_late_request_arrives_before_the_one_that_it_disturbs(
    proxy: KafkaProxy, broker: Broker, clients: list[Client]
) -> None:
    planned = proxy.plan(END, Fault.LATE, until=(END, Which(Api.PRODUCE, nth=2)))
    first, second = clients
    assert not first.asks(Api.END_TXN, 1), "its connection is cut"
    for api, number in ((Api.END_TXN, 2), (Api.PRODUCE, 3), (Api.PRODUCE, 4)):
        assert second.asks(api, number)
    assert broker.numbers == [2, 3, 1, 4]
    assert planned.has_met_its_point and planned.is_over


def test_a_copy_comes_when_it_is_released(proxy: KafkaProxy, broker: Broker, clients: list[Client]) -> None:
    planned = proxy.plan(END, Fault.REPEATED, until=())
    for api, number in ((Api.PRODUCE, 1), (Api.END_TXN, 2), (Api.PRODUCE, 3)):
        assert clients[0].asks(api, number)
    planned.release()
    eventually(lambda: planned.is_over)
    assert broker.numbers == [1, 2, 3, 2]


def test_a_held_request_blocks_its_connection(proxy: KafkaProxy, broker: Broker, clients: list[Client]) -> None:
    planned = proxy.plan(END, Fault.HELD)
    first, second = clients
    first.send(Api.END_TXN, 1)
    eventually(lambda: planned.has_hit)
    first.send(Api.PRODUCE, 2)
    assert second.asks(Api.PRODUCE, 3) and broker.numbers == [3]
    planned.release()
    eventually(lambda: broker.numbers == [3, 1, 2])


@pytest.mark.parametrize(("fault", "seen"), [(Fault.CUT_BEFORE, [2]), (Fault.CUT_AFTER, [1, 2])])
def test_a_cut_request_has_no_answer(
    proxy: KafkaProxy, broker: Broker, clients: list[Client], fault: Fault, seen: list[int]
) -> None:
    proxy.plan(PRODUCE, fault)
    assert not clients[0].asks(Api.PRODUCE, 1)
    assert clients[1].asks(Api.PRODUCE, 2)
    assert broker.numbers == seen


def test_a_fault_that_is_withdrawn_does_not_happen(proxy: KafkaProxy, clients: list[Client]) -> None:
    proxy.withdraw(proxy.plan(PRODUCE, Fault.CUT_BEFORE))
    assert clients[0].asks(Api.PRODUCE, 1)
