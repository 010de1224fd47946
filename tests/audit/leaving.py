"""Messages that leave the queues of groups unsettled, each in another way, and those that only look as if they did."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from notify.protocol import ids
from notify.protocol.wire import Payload, encode_msgpack
from notify.server.configuration.records import Records
from notify.server.database import open_database
from notify.server.delivery.settling import dead_payload
from notify.storage.groups import SettleKind, Subscription
from notify.storage.log.store import LogStore
from notify.storage.names import dead_letter_topic, dropped_topic, redriven_id
from notify.storage.records import NewMessage, NewTransaction, StoredMessage
from notify.storage.topics import Backlog, Topic
from tools.bench.made_run import transaction_id

STEP_US = 10_000
WHO, WHY = "ann", "a typo"


@dataclass
class Leaving:
    """Plants them with a log's store. `left`: the message ids by group and cause (spark.changes, spark.left_out)."""

    store: LogStore
    now_us: int
    records: Records | None
    """Where what was done by hand is recorded; None: nowhere."""
    each: int = 2
    frames_us: Callable[[], int] | None = None
    """The clock of the store, by which changes are dated; None: `clock`."""
    left: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1 << 40))

    def clock(self) -> int:
        return self.now_us

    @property
    def ids(self) -> set[str]:
        """All messages that a group never settled."""
        return set().union(*self.left.values())

    async def plant(self) -> None:
        await self.reset()
        await self.unsubscribed()
        await self.deleted()
        await self.purged()
        await self.backlog_full()
        await self.expired()
        await self.letters()
        await self.letters_deleted()
        await self.not_for_the_group()
        await self.read_again()
        await self.store.sync()

    # --- what left ------------------------------------------------------------------------------------------------

    async def reset(self) -> None:
        """A group settles some, and is moved past the others; what comes then it settles."""
        await self._follow("moved", "left.reset")
        settled, skipped = await self._sent("left.reset"), await self._sent("left.reset")
        await self._settle("moved", "left.reset", 0, len(settled))
        with self._done("group.reset", "moved/left.reset", {"queues": []}):
            end = self.store.bounds("left.reset", 0)[1]
            await self.store.subscribe(Subscription("moved", "left.reset", epoch=1), [end])
        self.left["moved", "reset"] = set(skipped)
        later = await self._sent("left.reset")
        await self._settle("moved", "left.reset", end, len(later))

    async def unsubscribed(self) -> None:
        """A group settles some and unsubscribes. What comes then is not for it, in the same moment neither."""
        await self._follow("leaver", "left.ended")
        settled, waiting = await self._sent("left.ended"), await self._sent("left.ended")
        await self._settle("leaver", "left.ended", 0, len(settled))
        with self._done("subscription.delete", "leaver/left.ended", {}):
            await self.store.unsubscribe("leaver", "left.ended")
        self.left["leaver", "unsubscribed"] = set(waiting)
        await self._sent("left.ended")
        await self.store.subscribe(Subscription("leaver", "left.ended"), [self.store.bounds("left.ended", 0)[1]])

    async def deleted(self) -> None:
        """A topic is deleted before a group has settled its messages, and made again."""
        await self._follow("orphan", "left.deleted")
        settled, waiting = await self._sent("left.deleted"), await self._sent("left.deleted")
        await self._settle("orphan", "left.deleted", 0, len(settled))
        with self._done("topic.delete", "left.deleted", {"deleted": "left.deleted"}):
            await self.store.delete_topic("left.deleted")
        self.left["orphan", "topic deleted"] = set(waiting)
        await self._follow("orphan", "left.deleted")
        again = await self._sent("left.deleted")
        await self._settle("orphan", "left.deleted", 0, len(again))

    async def purged(self) -> None:
        await self._follow("slow", "left.purged")
        waiting = await self._sent("left.purged")
        rows = [{"queue": 0, "from": 0, "to": len(waiting), "dropped": len(waiting)}]
        with self._done("topic.purge", "left.purged", {"queues": rows, "missed": {"slow": len(waiting)}}):
            self.store.trim("left.purged", 0, len(waiting))
        self.left["slow", "purged"] = set(waiting)
        await self._settle("slow", "left.purged", len(waiting), len(await self._sent("left.purged")))

    async def backlog_full(self) -> None:
        """A topic drops its oldest messages twice, after somebody gave it that policy."""
        topic = Topic("left.full", backlog=self.each, backlog_policy=Backlog.DROP_OLDEST)
        with self._done("topic.put", "left.full", {"backlog": self.each, "backlog_policy": "drop_oldest"}):
            await self.store.create_topic(topic)
        await self._follow("behind", "left.full")
        waiting = await self._sent("left.full")
        for n in range(len(waiting)):
            self._pass()
            self.store.trim("left.full", 0, n + 1)
        self.left["behind", "backlog full"] = set(waiting)
        await self._settle("behind", "left.full", len(waiting), len(await self._sent("left.full")))

    async def expired(self) -> None:
        with self._done("topic.put", "left.expired", {"ttl": 5.0}):
            await self.store.create_topic(Topic("left.expired", ttl_us=5_000_000))
        await self._follow("late", "left.expired")
        waiting = await self._sent("left.expired")
        await self._settle("late", "left.expired", 0, len(waiting), SettleKind.EXPIRED)
        self.left["late", "expired"] = set(waiting)

    async def letters(self) -> None:
        """Dead letters are dropped, and others purged."""
        await self._follow("tired", "left.dead")
        dropped, purged = await self._dead(), await self._dead()
        notes = dropped_topic("tired")
        await self.store.create_topic(Topic(notes))
        note = NewMessage(notes, encode_msgpack(Payload(notes, b"")))
        of_letters = [{"id": message_id, "status": 204} for message_id in dropped]
        with self._done("dead_letter.drop", "tired", {"items": of_letters}):
            for offset, message_id in enumerate(dropped):
                transaction, _ = ids.parse_message_id(message_id)
                again = redriven_id(dead_letter_topic("tired"), transaction, offset)
                await self.store.put([NewTransaction(again, "", [note], committed=True)], self.now_us)
        end = len(dropped) + len(purged)
        rows = [{"queue": 0, "from": 0, "to": end, "dropped": end}]
        with self._done("dead_letter.purge", "tired", {"queues": rows}):
            self.store.trim(dead_letter_topic("tired"), 0, end)
        self.left["tired", "dead letter dropped"] = set(dropped)
        self.left["tired", "dead letter purged"] = set(purged)

    async def letters_deleted(self) -> None:
        """The topic of a group's dead letters is deleted."""
        await self._follow("weary", "left.weary")
        dead, letters = await self._dead("weary", "left.weary"), dead_letter_topic("weary")
        with self._done("topic.delete", letters, {"deleted": letters}):
            await self.store.delete_topic(letters)
        self.left["weary", "dead letters deleted"] = set(dead)

    # --- what did not ---------------------------------------------------------------------------------------------

    async def not_for_the_group(self) -> None:
        """A group that began later, and those whose tags or filter exclude the messages, lose nothing."""
        await self._follow("all", "left.chosen")
        others = await self._sent("left.chosen", tag="b")
        end = len(others)
        await self.store.subscribe(Subscription("newcomer", "left.chosen"), [end])
        tagged = Subscription("tagged", "left.chosen", tags=("a",))
        eastern = Subscription("eastern", "left.chosen", filter='headers.region == "east"')
        for subscription in (tagged, eastern):
            await self.store.subscribe(subscription, [0])
        wanted = await self._sent("left.chosen", tag="a", region="east")
        await self._settle("all", "left.chosen", 0, 2 * self.each)
        for group in ("tagged", "eastern", "newcomer"):
            with self._done("subscription.delete", f"{group}/left.chosen", {}):
                await self.store.unsubscribe(group, "left.chosen")
            self.left[group, "unsubscribed"] = set(wanted)

    async def read_again(self) -> None:
        """A group is moved forward, and back again, and settles all; another has settled all before it is moved."""
        for group in ("back", "done"):
            await self._follow(group, "left.again")
        sent = await self._sent("left.again")
        await self._settle("done", "left.again", 0, len(sent))
        for group, epoch, to in (("back", 1, len(sent)), ("back", 2, 0), ("done", 1, len(sent))):
            self._pass()
            await self.store.subscribe(Subscription(group, "left.again", epoch=epoch), [to])
        await self._settle("back", "left.again", 0, len(sent))

    # --- steps ----------------------------------------------------------------------------------------------------

    def _pass(self) -> None:
        self.now_us += STEP_US

    async def _follow(self, group: str, topic: str) -> None:
        if not self.store.has_topic(topic):
            await self.store.create_topic(Topic(topic))
        await self.store.subscribe(Subscription(group, topic), [0])

    async def _sent(self, topic: str, tag: str | None = None, **headers: str) -> list[str]:
        """Messages that are published without a transaction."""
        sent = []
        for _ in range(self.each):
            self._pass()
            name = transaction_id(next(self._numbers), self.now_us)
            payload = encode_msgpack(Payload(topic, b"body", tag=tag, headers=headers))
            message = NewMessage(topic, payload, tag=tag)
            await self.store.put([NewTransaction(name, "", [message], committed=True)], self.now_us)
            sent.append(f"{ids.to_text(name)}.0")
        return sent

    async def _settle(self, group: str, topic: str, first: int, count: int, kind: SettleKind = SettleKind.ACK) -> None:
        self._pass()
        await self.store.settle(group, topic, 0, [(first, count)], kind, self.now_us)

    async def _dead(self, group: str = "tired", topic: str = "left.dead") -> list[str]:
        first = self.store.bounds(topic, 0)[1]
        sent = await self._sent(topic)
        for message in self.store.read(topic, 0, first, len(sent), 1 << 20):
            assert isinstance(message, StoredMessage)
            payload = dead_payload(group, message, 16, "no such customer", 0)
            self.store.dead_letter_soon(group, [(message, payload)], self.now_us)
        return sent

    @contextmanager
    def _done(self, what: str, target: str, result: Any) -> Iterator[None]:
        """Something that a person does, which a server records before it is done."""
        self._pass()
        if self.records is not None:
            at_us = (self.frames_us or self.clock)()
            self.records.record(at_us, WHO, what, target, WHY, result)
        self._pass()
        yield


@contextmanager
def records_beside(log: Path) -> Iterator[Records]:
    """The records of the server whose log it is."""
    engine = open_database(str(log.parent))
    try:
        yield Records(engine)
    finally:
        engine.dispose()


def told(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str], tuple[int, str | None, str | None]]:
    """How many messages left by what, by whom and why: from an audit's result."""
    assert json.dumps(rows)  # as in the report
    return {(row["group"], row["how"]): (row["messages"], row["who"], row["reason"]) for row in rows}
