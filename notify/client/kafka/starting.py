"""Starts: decides where a group begins in a partition without a committed offset.

The calls block, and raise KafkaException.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import NamedTuple

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

from notify.client.kafka.control import Orders
from notify.client.kafka.partitions import Place
from notify.client.kafka.plan import Plan
from notify.client.kafka.refusals import is_final
from notify.errors import NotifyError
from notify.kafka.calls import answered, offset_of
from notify.kafka.cluster import Cluster
from notify.kafka.progress import Progress
from notify.kafka.subscriptions import Place as NotedPlace
from notify.kafka.subscriptions import Subscriptions
from notify.kafka.topic_ids import TopicIds
from notify.runtime.program_log import program_log

log = program_log("notify.consumer")

CALL_SECONDS = 10.0
LEADER_SECONDS = 5.0
"""How long to wait for a partition without a leader, such as a new one, before the others begin without it."""
LOOK_BACK = 100
"""How many offsets before the last record that was read are looked at: a transaction's marker may have its offset."""
STEP_SECONDS, FETCH_MS = 0.2, 20
Start = str | int | datetime


class Bound(NamedTuple):
    """The first or end offset of a partition, and the epoch that its leader tells with it, if any."""

    offset: int
    epoch: int | None


class Starts:
    """Finds the first offsets of a group.

    A topic that is new to the group begins where its handler says. A new partition, or a new topic of a pattern, begins
    at its first record, and so do retry topics. Kafka forgets the offsets of a group that rests
    (offsets.retention.minutes, a week). Then the group continues at its last note, and receives later messages again.
    """

    def __init__(
        self,
        plan: Plan,
        consumer: Consumer,
        cluster: Cluster,
        orders: Orders,
        noted: Subscriptions | None,
        ids: TopicIds,
    ) -> None:
        self._plan = plan
        self._consumer = consumer
        self._cluster = cluster
        self._orders = orders
        self._noted = noted
        self._ids = ids
        self._starts: dict[Place, Start] = {}
        """Where the group begins in partitions that existed when this process started and have no progress yet."""
        self._leaderless: dict[Place, float] = {}
        """Since when partitions have had no leader."""

    def look(self, topics: Mapping[str, int]) -> None:
        """Find out, once before anything is read, in which of the topics (with their partitions) the group has progress
        already."""
        places = [(topic, n) for topic, partitions in topics.items() for n in range(partitions)]
        known_topics = {place[0] for place, progress in self.committed(places).items() if progress is not None}
        for topic in topics:
            handler = self._plan.handler_of(topic)
            # A topic of a pattern in which an older group has no progress was created later than the group.
            if topic not in known_topics and handler is not None and ("*" not in handler.topic or not known_topics):
                start = handler.start if handler.start is not None else "latest"
                self._starts |= dict.fromkeys([(topic, n) for n in range(topics[topic])], start)

    def committed(self, places: Iterable[Place]) -> dict[Place, Progress | None]:
        """The group's progress in each partition; None if it has no progress there."""
        partitions = [TopicPartition(*place) for place in places]
        if not partitions:
            return {}
        committed = self._consumer.committed(partitions, timeout=CALL_SECONDS)
        return {(p.topic, p.partition): Progress.of(p.offset, p.metadata) if p.offset >= 0 else None for p in committed}

    def positions(self, places: Iterable[Place]) -> tuple[dict[Place, Progress | None], dict[Place, int]]:
        """The group's progress in each partition, and the first offsets of the partitions without progress.

        Progress is ignored if a reset was ordered while no instance had the partition, so that messages that the reset
        skips are not handled first. Partitions without progress and without a leader are in neither result.
        """
        places = list(places)
        self._ids.look({topic for topic, _ in places})
        progresses = self.committed(places)
        begins, ends = self._bounds([place for place, progress in progresses.items() if progress is not None])
        moved: dict[Place, Start] = self._cut(progresses, begins, ends)
        for place, progress in progresses.items():
            if progress is not None and place in begins and place not in moved:
                tell_deleted(self._plan.group, place, progress.offset, begins[place].offset, progress.done)
        others = {p: at for p, at in progresses.items() if at is not None and not at.is_own}
        tell_moved(self._plan.group, others)
        if self._noted is not None:
            self._noted.moved({NotedPlace(*place): at.offset for place, at in others.items()})
        progresses |= self._with_resets(progresses)
        for place, progress in progresses.items():
            if progress is not None:
                self._starts.pop(place, None)
            reset = self._orders.control.reset_of(place[0])
            if progress is not None and reset is not None and reset.id != progress.reset:
                log.warning("topic %s of this group continues from %s, by reset %s", reset.topic, reset.to, reset.id)
                if self._noted is not None and place not in moved:
                    self._noted.moving(NotedPlace(*place), progress, reset.id)
                moved[place] = reset.start()
        progresses |= dict.fromkeys(moved)
        begun = self.begin([place for place, progress in progresses.items() if progress is None and place not in moved])
        begun |= self.offsets(moved)
        return {p: progress for p, progress in progresses.items() if progress is not None or p in begun}, begun

    def _with_resets(self, known: Mapping[Place, Progress | None]) -> dict[Place, Progress]:
        """The progress that other tools committed, such as kafka-consumer-groups.sh, with the resets that were noted as
        carried out there: a commit of another tool does not name them, and they would be repeated."""
        others = {
            place: progress
            for place, progress in known.items()
            if progress is not None and not progress.is_own and self._orders.control.reset_of(place[0]) is not None
        }
        if self._noted is None or not others:
            return {}
        try:
            carried_out: dict[Place, str] = {(p.topic, p.partition): reset for p, reset in self._noted.resets().items()}
        except NotifyError as error:
            log.warning("which resets group %s has carried out cannot be read: %s", self._plan.group, error)
            return {}
        return {place: replace(progress, reset=carried_out.get(place, "")) for place, progress in others.items()}

    def _cut(
        self, known: Mapping[Place, Progress | None], begins: Mapping[Place, Bound], ends: Mapping[Place, Bound]
    ) -> dict[Place, Start]:
        """The partitions of recreated topics, and those that end before the group's offset, or have other records
        before it, for example because their new leader lacked the last records.

        Their records have other offsets now. The group begins at the earliest, and may handle some of them again.
        """
        cut: dict[Place, Start] = {}
        suspects: dict[Place, tuple[tuple[int, int], int]] = {}
        for place, progress in known.items():
            end, topic_id = ends.get(place), self._ids.of(place[0])
            if progress is not None and progress.topic and topic_id and progress.topic != topic_id:
                log.warning(
                    "topic %s was deleted and recreated; group %s starts over there", place[0], self._plan.group
                )
                cut[place] = "earliest"
            elif progress is not None and end is not None and end.offset < progress.offset:
                log.warning(
                    "topic %s ends at %d in partition %d, where group %s was at %d: it was recreated, or its last "
                    "records are lost; the group starts over there", place[0], end.offset, place[1], self._plan.group,
                    progress.offset,
                )  # fmt: skip
                cut[place] = "earliest"
            elif progress is not None and progress.last is not None and end is not None and place in begins:
                offset, epoch = progress.last
                if epoch != end.epoch and offset >= begins[place].offset:  # by an unchanged leader nothing was cut
                    suspects[place] = progress.last, begins[place].offset
        for place in self._replaced(suspects):
            log.warning(
                "topic %s has other records in partition %d than group %s has read: its last records were lost, and "
                "others written in their place; the group starts over there", place[0], place[1], self._plan.group,
            )  # fmt: skip
            cut[place] = "earliest"
        return cut

    def _replaced(self, suspects: Mapping[Place, tuple[tuple[int, int], int]]) -> list[Place]:
        """The partitions with a record of a later epoch before, or in place of, the last record that the group read.

        `suspects`: that record's offset and leader epoch, and where the partition begins.
        """
        if not suspects:
            return []
        replaced: list[Place] = []
        unread = {place: last for place, (last, _) in suspects.items()}
        # Not the feed's client: it fetches elsewhere. The name of its group has no meaning.
        own = {"group.id": f"{self._plan.group}-control", "enable.partition.eof": True, "fetch.wait.max.ms": FETCH_MS}
        consumer = self._cluster.consumer({**own, "auto.offset.reset": "earliest"})
        try:
            consumer.assign(
                [TopicPartition(*place, max(begin, last - LOOK_BACK)) for place, ((last, _), begin) in suspects.items()]
            )
            heard = time.monotonic()
            while unread:
                record = consumer.poll(STEP_SECONDS)
                if time.monotonic() - heard > CALL_SECONDS:
                    raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "Kafka gives no records"))
                if record is None:
                    continue
                error, place = record.error(), (record.topic(), record.partition())
                if place not in unread:
                    continue
                if error is not None and error.code() != KafkaError._PARTITION_EOF:
                    if is_final(error):
                        raise KafkaException(error)
                    continue
                heard = time.monotonic()
                last, epoch = unread[place]
                offset = record.offset() or 0
                if error is None and offset <= last and (record.leader_epoch() or 0) > epoch:
                    replaced.append(place)
                elif error is None and offset < last:
                    continue
                del unread[place]
        finally:
            consumer.close()
        return replaced

    def look_behind(self, jumps: Mapping[Place, tuple[int, int]]) -> None:
        """Log which of these ranges of offsets without a record were deleted: the client skips them silently."""
        begins, _ = self._bounds(jumps)
        for place, begin in begins.items():
            start, end = jumps[place]
            tell_deleted(self._plan.group, place, start, min(begin.offset, end))

    def _bounds(self, places: Collection[Place]) -> tuple[dict[Place, Bound], dict[Place, Bound]]:
        """The first and end offsets of the partitions that have a leader, except where the brokers refuse.

        The ends include open transactions.
        """
        led = self._with_leader(places)
        if not led:
            return {}, {}
        admin = self._cluster.admin()
        answers = [
            admin.list_offsets({TopicPartition(*place): spec for place in led}, request_timeout=CALL_SECONDS)
            for spec in (OffsetSpec.earliest(), OffsetSpec.latest())  # type: ignore[no-untyped-call]
        ]
        bounds: tuple[dict[Place, Bound], dict[Place, Bound]] = {}, {}
        for offsets, partition_answers in zip(bounds, answers, strict=True):
            for p, answer in partition_answers.items():
                with contextlib.suppress(KafkaException):
                    bound = answered(answer, CALL_SECONDS)
                    offsets[p.topic, p.partition] = Bound(offset_of(bound), bound.leader_epoch)
        return bounds

    def begin(self, places: Iterable[Place]) -> dict[Place, int]:
        """The offsets where partitions without progress begin; partitions without a leader are left out."""
        starts: dict[Place, Start] = {place: self._starts.get(place, "earliest") for place in self._led(places)}
        return self._offsets(starts | self._forgotten(starts))

    def _forgotten(self, places: Collection[Place]) -> dict[Place, Start]:
        """Where the group continues, by its notes, in partitions whose offsets Kafka has forgotten."""
        if self._noted is None or not places:
            return {}
        try:
            last: dict[Place, tuple[int, str]] = {(p.topic, p.partition): at for p, at in self._noted.last().items()}
        except NotifyError as error:
            log.warning("whether group %s was here before cannot be read: %s", self._plan.group, error)
            return {}
        noted = {place: last[place][0] for place in places if place in last}
        if not noted:
            return {}
        log.warning(
            "Kafka has forgotten the offsets of group %s in %d partitions (offsets.retention.minutes): it continues "
            "at its last note, and messages that it handled later come again",
            self._plan.group,
            len(noted),
        )
        ends = self._listed({place: OffsetSpec.latest() for place in noted})  # type: ignore[no-untyped-call]
        self._ids.look({topic for topic, _ in noted})

        def is_recreated(place: Place) -> bool:
            noted_id, topic_id = last[place][1], self._ids.of(place[0])
            return noted[place] > ends[place] or bool(noted_id and topic_id and noted_id != topic_id)

        # A topic that ends before the noted offset, or has another id, was deleted and recreated.
        return {place: "earliest" if is_recreated(place) else offset for place, offset in noted.items()}

    def offsets(self, starts: Mapping[Place, Start]) -> dict[Place, int]:
        """The offset of each start. An instant after the last record gives the end; an offset is limited to the range.

        The end is before the first open transaction, so that messages that commit later are not skipped. Partitions
        without a leader are left out.
        """
        return self._offsets({place: starts[place] for place in self._led(starts)})

    def _offsets(self, starts: Mapping[Place, Start]) -> dict[Place, int]:
        if not starts:
            return {}
        lows = self._listed({place: OffsetSpec.earliest() for place in starts})  # type: ignore[no-untyped-call]
        ends = self._listed({place: OffsetSpec.latest() for place in starts})  # type: ignore[no-untyped-call]
        instants = {
            place: OffsetSpec.for_timestamp(round(start.timestamp() * 1000))
            for place, start in starts.items()
            if isinstance(start, datetime)
        }
        by_time = self._listed(instants)
        offsets = {}
        for place, start in starts.items():
            if isinstance(start, datetime):
                offsets[place] = by_time[place] if by_time[place] >= 0 else ends[place]
            elif isinstance(start, int):
                offsets[place] = min(max(start, lows[place]), ends[place])
            else:
                offsets[place] = lows[place] if start == "earliest" else ends[place]
        return offsets

    def _listed(self, specs: Mapping[Place, OffsetSpec]) -> dict[Place, int]:
        if not specs:
            return {}
        requests = {TopicPartition(*place): spec for place, spec in specs.items()}
        # A new client, because an existing one keeps using the partitions and leaders that it saw first.
        admin = self._cluster.admin()
        answers = admin.list_offsets(
            requests, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=CALL_SECONDS
        )
        return {(p.topic, p.partition): offset_of(answered(answer, CALL_SECONDS)) for p, answer in answers.items()}

    def _led(self, places: Iterable[Place]) -> list[Place]:
        """The partitions that have a leader. Raises KafkaException while one of the others may get a leader soon."""
        places = list(places)
        led = self._with_leader(places)
        waiting = [place for place in places if place not in led]
        now = time.monotonic()
        self._leaderless = {place: since for place, since in self._leaderless.items() if place not in led}
        for place in waiting:
            self._leaderless.setdefault(place, now)
            if self._starts.get(place) == "latest":  # do not skip messages that come from now on
                self._starts[place] = datetime.now(UTC)
        soon = [place for place in waiting if now - self._leaderless[place] < LEADER_SECONDS]
        if soon:
            text = f"partition {soon[0][1]} of {soon[0][0]} has no leader"
            raise KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE, text))
        if waiting:
            log.warning(
                "group %s does not begin yet in %d partitions, such as %d of %s: they have no leader; start their "
                "brokers", self._plan.group, len(waiting), waiting[0][1], waiting[0][0],
            )  # fmt: skip
        return [place for place in places if place in led]

    def _with_leader(self, places: Collection[Place]) -> set[Place]:
        """The partitions that have a leader now."""
        if not places:
            return set()
        topics = self._cluster.admin().list_topics(timeout=CALL_SECONDS).topics
        return {
            (name, n)
            for name, n in places
            if name in topics and n in topics[name].partitions and topics[name].partitions[n].leader >= 0
        }


def tell_deleted(group: str, place: Place, position: int, begin: int, done: Collection[int] = ()) -> None:
    """Log an error if the brokers have deleted messages that a group had not handled: if a partition begins after the
    group's position.

    `done`: offsets after the position that are done. The number is an upper bound, since transaction markers have
    offsets too.
    """
    deleted = begin - position - sum(offset < begin for offset in done)
    if deleted > 0:
        log.error(
            "up to %d messages of topic %s, partition %d, were deleted before group %s handled them: the topic keeps "
            "messages for a shorter time (retention.ms, retention.bytes) than the group lagged. It continues at %d",
            deleted, place[0], place[1], group, begin,
        )  # fmt: skip


def tell_moved(group: str, others: Mapping[Place, Progress]) -> None:
    """Log that a group continues at offsets that other programs have committed: they say nothing about what this
    group has handled. `others`: these offsets."""
    for topic in sorted({topic for topic, _ in others}):
        offsets = sorted((partition, at.offset) for (name, partition), at in others.items() if name == topic)
        log.warning(
            "group %s continues in %d partitions of topic %s, such as %d at %d, where another program has committed "
            "its offsets: messages before them that this group had not handled are left out. If nobody has moved the "
            "group on purpose, that program consumes with this group's name: give it another one",
            group, len(offsets), topic, *offsets[0],
        )  # fmt: skip
