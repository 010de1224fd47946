"""Records the progress of groups: settlements, failed attempts and dead letters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from notify.storage.groups import SettleKind
from notify.storage.log.entry import ENTRY_HEAD, ENTRY_TAIL, EntryKind
from notify.storage.log.format import crc32c
from notify.storage.log.journal import Journal
from notify.storage.log.queues import Queue
from notify.storage.log.records import ATTEMPTS, Held, Progressed, RecordType, dead_letter_head, encode
from notify.storage.log.state import LogState
from notify.storage.log.topics import Topics
from notify.storage.names import dead_letter_topic
from notify.storage.progress import QueueProgress
from notify.storage.records import StoredMessage
from notify.storage.topics import Topic


class Settling:
    """Appends PROGRESS and DEAD_LETTER records."""

    def __init__(self, state: LogState, journal: Journal, topics: Topics) -> None:
        self._state = state
        self._journal = journal
        self._topics = topics

    def progress(self, group: str, topic: str, queue: int) -> QueueProgress:
        return self._state.group_progress(group, self._state.queue(topic, queue).topic.id, queue)

    async def settle(
        self, group: str, topic: str, queue: int, runs: Iterable[tuple[int, int]], kind: SettleKind, now_us: int
    ) -> None:
        self.settle_soon(group, topic, queue, list(runs), kind)
        await self._journal.sync()

    def settle_soon(self, group: str, topic: str, queue: int, runs: list[tuple[int, int]], kind: SettleKind) -> None:
        number = self._state.queue(topic, queue).key >> 16
        self._journal.reserve(256 + 24 * len(runs))
        progress = self._state.progress.get((group, number, queue))
        if progress is None:
            progress = self._state.group_progress(group, number, queue)
        for first, count in runs:
            progress.settle(first, count)
        record = Progressed(int(kind), group, number, queue, runs)
        self._journal.append(RecordType.PROGRESS, encode(record))

    def attempted(self, group: str, topic: str, queue: int, offsets: Sequence[tuple[int, ...]]) -> None:
        number = self._state.queue(topic, queue).topic.id
        self._journal.reserve(256 + 48 * len(offsets))
        self._state.group_progress(group, number, queue).again(offsets)
        record = Progressed(ATTEMPTS, group, number, queue, list(offsets))
        self._journal.append(RecordType.PROGRESS, encode(record))

    def hold(
        self, group: str, topic: str, queue: int, offsets: Sequence[tuple[int, ...]], reasons: Sequence[str]
    ) -> None:
        number = self._state.queue(topic, queue).topic.id
        self._journal.reserve(256 + 64 * len(offsets) + 4 * sum(map(len, reasons)))
        self._state.group_progress(group, number, queue).again(offsets, reasons)
        record = Held(ATTEMPTS, group, number, queue, list(offsets), reasons)
        self._journal.append(RecordType.PROGRESS, encode(record))

    def dead_letter_soon(self, group: str, messages: Sequence[tuple[StoredMessage, bytes]], now_us: int) -> None:
        state, journal = self._state, self._journal
        name = dead_letter_topic(group)
        journal.reserve(8192 + sum(len(payload) + 256 for _, payload in messages))
        if name not in state.topics:
            self._topics.create_soon(Topic(name))
        queue = state.topics[name].queues[0]
        settled = []
        for message, _ in messages:
            number = state.queue(message.topic, message.queue).topic.id
            state.group_progress(group, number, message.queue).settle(message.offset, 1)
            run = (message.offset, 1)
            settled.append(Progressed(int(SettleKind.DEAD_LETTER), group, number, message.queue, [run]))
        head = dead_letter_head(settled)
        position = journal.data_position(len(messages)) + len(head)
        entries = []
        for message, payload in messages:
            entries.append(_entry_of_letter(queue, message, payload, position, now_us))
            position += len(payload)
        data = head + b"".join([payload for _, payload in messages])
        journal.append(RecordType.DEAD_LETTER, data, entries, [queue] * len(entries), "dead_letter")


def _entry_of_letter(queue: Queue, message: StoredMessage, payload: bytes, position: int, now_us: int) -> bytes:
    """The entry of a dead letter, at the next offset of its queue."""
    offset = queue.next_offset
    queue.next_offset = offset + 1
    tail = ENTRY_TAIL.pack(
        position,
        len(payload),
        message.message_no,
        0,
        0,
        message.transaction_id,
        message.tag_hash,
        crc32c(payload),
        0,
    )
    return ENTRY_HEAD.pack(EntryKind.QUEUE, 0, 0, queue.topic.id, now_us, offset) + tail
