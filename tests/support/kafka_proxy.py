"""A proxy before a Kafka broker that knows requests when it sees them: it holds, cuts, repeats and delays some of them.

The broker advertises the proxy's port, so that nothing is rewritten. Only the heads of frames are decoded, and of
EndTxn whether it commits: https://kafka.apache.org/protocol. A connection's bytes stay in order, as TCP keeps them;
requests overtake each other only by way of another connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import socket
import struct
import threading
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.clock import PATIENCE_SECONDS

_LENGTH = struct.Struct(">i")
_HEAD = struct.Struct(">hhi")
BROKERS_ONLY = 4
"""From this version on AddPartitionsToTxn is a broker's question to the coordinator, which also comes through here."""
COMPACT = 3
"""From this version on tagged fields follow EndTxn's last field."""


class Api(enum.IntEnum):
    """The requests of a transaction, and the one for a node's groups, by their keys in Kafka's protocol."""

    PRODUCE = 0
    FIND_COORDINATOR = 10
    LIST_GROUPS = 16
    INIT_PRODUCER_ID = 22
    ADD_PARTITIONS_TO_TXN = 24
    ADD_OFFSETS_TO_TXN = 25
    END_TXN = 26
    TXN_OFFSET_COMMIT = 28


class Fault(enum.Enum):
    """The kinds of faults that happen to a request."""

    HELD = "held"
    """It waits on its way, and so does all that its connection sends after it."""
    CUT_BEFORE = "cut before"
    """It is lost with its connection."""
    CUT_AFTER = "cut after"
    """The broker has it, and its connection is cut before the answer."""
    REPEATED = "repeated"
    """It arrives, and once more later, over another connection."""
    LATE = "late"
    """Its connection is cut for the client, and the broker gets it later."""


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a request. `commit`: for EndTxn whether it commits."""

    api: int
    version: int
    correlation: int
    commit: bool | None = None

    @classmethod
    def of(cls, frame: bytes) -> Head:
        """The head of a frame, which begins with its length."""
        api, version, correlation = _HEAD.unpack_from(frame, _LENGTH.size)
        commit = bool(frame[-2 if version >= COMPACT else -1]) if api == Api.END_TXN else None
        return cls(api, version, correlation, commit)


@dataclass(frozen=True, slots=True)
class Which:
    """The `nth` request (from 1) of this kind that has these bytes in it, such as the transactional id."""

    api: Api
    about: bytes = b""
    commit: bool | None = None
    nth: int = 1

    def matches(self, head: Head, frame: bytes) -> bool:
        return (
            head.api == self.api
            and (self.commit is None or head.commit == self.commit)
            and not (head.api == Api.ADD_PARTITIONS_TO_TXN and head.version >= BROKERS_ONLY)
            and self.about in frame
        )


class _Counted:
    """Finds the request that is meant."""

    def __init__(self, which: Which) -> None:
        self._which = which
        self._left = which.nth

    def is_met_by(self, head: Head, frame: bytes) -> bool:
        self._left -= self._which.matches(head, frame)
        return self._left == 0


class Planned:
    """A fault that is waited for, is happening, or is over."""

    def __init__(self, loop: asyncio.AbstractEventLoop, which: Which, fault: Fault, until: Sequence[Which] | None):
        self.fault = fault
        self._loop = loop
        self._which = _Counted(which)
        self._until = deque(_Counted(each) for each in until or ())
        self._released = asyncio.Event()
        self._arrived = asyncio.Event()
        self.has_hit = False
        """Whether the request has come."""
        self.has_met_its_point = False
        """Whether the last request of `until` has come."""
        if until is None and fault in (Fault.CUT_AFTER, Fault.REPEATED):
            self._released.set()

    @property
    def is_over(self) -> bool:
        """Whether the broker has had all bytes that it will have, and has answered them."""
        return self._arrived.is_set()

    def release(self) -> None:
        """Let what waits happen."""
        self._loop.call_soon_threadsafe(self._released.set)

    def hits(self, head: Head, frame: bytes) -> bool:
        self.has_hit = not self.has_hit and self._which.is_met_by(head, frame)
        return self.has_hit

    def is_to_come_before(self, head: Head, frame: bytes) -> bool:
        """Whether what waits arrives before this request, which comes after the fault."""
        if not self._until or not self._until[0].is_met_by(head, frame):
            return False
        self._until.popleft()
        self.has_met_its_point = not self._until
        return self.has_met_its_point

    async def arrive(self) -> None:
        """Let what waits happen, and wait until it has."""
        self._released.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._arrived.wait(), PATIENCE_SECONDS)

    async def released(self) -> None:
        await self._released.wait()

    def over(self) -> None:
        self._arrived.set()


class KafkaProxy:
    """Forwards 127.0.0.1:`port` to a broker, with the faults that are planned."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self._listening.getsockname()[1]
        self._planned: list[Planned] = []
        self._lock = threading.Lock()
        """Held while planned faults are looked through, and while one is added."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kafka-proxy", daemon=True)
        self._thread.start()

    def plan(self, which: Which, fault: Fault, until: Sequence[Which] | None = None) -> Planned:
        """Have a fault happen to a request that comes from now on.

        What the fault keeps back (the request, its copy, or the cut before the answer) waits for `release`, or `until`
        these requests have come, one after the other; it is with the broker before the last of them is. Without `until`
        a copy or a cut does not wait.
        """
        planned = Planned(self._loop, which, fault, until)
        with self._lock:
            self._planned = [each for each in self._planned if not each.is_over]
            self._planned.append(planned)
        return planned

    def withdraw(self, planned: Planned) -> None:
        """Let a fault not happen, if its request has not come yet; what waits happens now."""
        with self._lock:
            self._planned = [each for each in self._planned if each is not planned or each.has_hit]
        planned.release()

    def close(self) -> None:
        """Stop listening, and cut open connections."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(PATIENCE_SECONDS)

    def __enter__(self) -> KafkaProxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- in the proxy's thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._accept, sock=self._listening))
        self._loop.run_forever()
        server.close()
        for task in self._tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        self._loop.run_until_complete(asyncio.sleep(0))  # closed connections end in the loop's next round
        self._loop.close()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Let work continue beside whoever asks for it, which ends without an error where a connection breaks."""

        async def guarded() -> None:
            with contextlib.suppress(OSError, EOFError, TimeoutError):
                await work

        task = self._loop.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.spawn(self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            broker = await asyncio.open_connection(*self._target)
        except OSError:  # the broker is unreachable
            writer.close()
            return
        connection = _Connection(self, (reader, writer), broker)
        self.spawn(connection.answers())
        await connection.requests()

    async def copied(self, planned: Planned, frame: bytes) -> None:
        """Send a copy of a request over another connection."""
        try:
            await planned.released()
            reader, writer = await asyncio.open_connection(*self._target)
            try:
                writer.write(frame)
                await asyncio.wait_for(_frame(reader), PATIENCE_SECONDS)
            finally:
                writer.close()
        finally:
            planned.over()

    def met(self, head: Head, frame: bytes) -> tuple[list[Planned], Planned | None]:
        """The faults that have to be over before this request continues, and the fault of the request."""
        with self._lock:
            waiting = [each for each in self._planned if each.has_hit]
            before = [each for each in waiting if each.is_to_come_before(head, frame)]
            others = (each for each in self._planned if each not in waiting)
            return before, next((each for each in others if each.hits(head, frame)), None)


class _Connection:
    """One client's connection, and the one to the broker behind it."""

    def __init__(
        self,
        proxy: KafkaProxy,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        broker: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self._proxy = proxy
        self._client_reader, self._client = client
        self._broker_reader, self._broker = broker
        self._unanswered: dict[int, asyncio.Future[None]] = {}
        """The requests that the broker has not answered yet, by correlation id."""
        self._cut_at: dict[int, Planned] = {}
        """The requests whose answer is cut."""

    async def requests(self) -> None:
        """Forward requests until the client ends, or a fault ends its connection."""
        try:
            while await self._request(await _frame(self._client_reader)):
                pass
        finally:
            self._client.close()
            self._broker.close()

    async def _request(self, frame: bytes) -> bool:
        """Forward a request; whether the connection continues."""
        head = Head.of(frame)
        before, planned = self._proxy.met(head, frame)
        for each in before:
            await self._answered()  # what came earlier comes earlier to the broker, too
            await each.arrive()
        if planned is None:
            await self._forward(head, frame)
            return True
        if planned.fault is Fault.REPEATED:
            await self._forward(head, frame)
            self._proxy.spawn(self._proxy.copied(planned, frame))
            return True
        try:
            if planned.fault is Fault.CUT_BEFORE:
                return False
            if planned.fault is Fault.CUT_AFTER:
                self._cut_at[head.correlation] = planned
            else:
                if planned.fault is Fault.LATE:
                    self._client.close()
                await planned.released()
            await self._forward(head, frame)
            await self._answered()
        finally:
            planned.over()
        return planned.fault is Fault.HELD

    async def _forward(self, head: Head, frame: bytes) -> None:
        self._unanswered[head.correlation] = asyncio.get_running_loop().create_future()
        self._broker.write(frame)
        await self._broker.drain()

    async def _answered(self) -> None:
        """Wait until the broker has answered all requests."""
        if self._unanswered:
            await asyncio.wait(list(self._unanswered.values()), timeout=PATIENCE_SECONDS)

    async def answers(self) -> None:
        """Forward answers until the broker ends, or the client's connection is cut."""
        try:
            while True:
                frame = await _frame(self._broker_reader)
                (correlation,) = _LENGTH.unpack_from(frame, _LENGTH.size)
                if (planned := self._cut_at.get(correlation)) is not None:
                    await planned.released()
                    self._client.close()
                if not self._client.is_closing():
                    self._client.write(frame)
                    with contextlib.suppress(OSError):  # the client has gone, and the broker still answers
                        await self._client.drain()
                self._done(correlation)
        finally:
            for correlation in list(self._unanswered):
                self._done(correlation)
            self._client.close()

    def _done(self, correlation: int) -> None:
        answered = self._unanswered.pop(correlation, None)
        if answered is not None and not answered.done():
            answered.set_result(None)


async def _frame(reader: asyncio.StreamReader) -> bytes:
    """The next frame with its length. Raises EOFError."""
    length = await reader.readexactly(_LENGTH.size)
    return length + await reader.readexactly(*_LENGTH.unpack(length))
