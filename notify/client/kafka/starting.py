"""Where a group begins in a partition that it has no offset for. The calls block, and raise KafkaException."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

from notify.client.kafka.control import Orders
from notify.client.kafka.partitions import Place
from notify.client.kafka.plan import Plan
from notify.errors import NotifyError
from notify.kafka.answers import answered, offset_of
from notify.kafka.cluster import Cluster
from notify.kafka.progress import Progress
from notify.kafka.subscriptions import Subscriptions
from notify.kafka.topic_ids import TopicIds

log = logging.getLogger("notify.consumer")

CALL_SECONDS = 10.0
LEADER_SECONDS = 5.0
"""So long a partition without a leader is waited for, such as one that was just made; then the others begin without it.
"""
Start = str | int | datetime


class Starts:
    """A topic that is new to the group begins where its handler says; a partition or topic that is new, at its first.

    Retries always begin at the earliest. Kafka forgets the offsets of a group that rests (offsets.retention.minutes, a
    week): it goes on where it was noted last, and receives what it did after that note again.
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
        """Where the group begins in partitions that were there when this process started, and nobody has begun yet."""
        self._leaderless: dict[Place, float] = {}
        """Since when partitions have no leader."""

    def look(self, topics: Mapping[str, int]) -> None:
        """Look once, before anything is read, which of the topics (with their partitions) the group knows already."""
        places = [(topic, n) for topic, partitions in topics.items() for n in range(partitions)]
        known = {place[0] for place, progress in self.committed(places).items() if progress is not None}
        for topic in topics:
            handler = self._plan.handler_of(topic)
            # A topic that a pattern stands for, and that an older group does not know, was made later than the group.
            if topic not in known and handler is not None and ("*" not in handler.topic or not known):
                start = handler.start if handler.start is not None else "latest"
                self._starts |= dict.fromkeys([(topic, n) for n in range(topics[topic])], start)

    def committed(self, places: Iterable[Place]) -> dict[Place, Progress | None]:
        """The group's progress in each partition; None where it has none."""
        asked = [TopicPartition(*place) for place in places]
        if not asked:
            return {}
        answered = self._consumer.committed(asked, timeout=CALL_SECONDS)
        return {(p.topic, p.partition): Progress.of(p.offset, p.metadata) if p.offset >= 0 else None for p in answered}

    def positions(self, places: Iterable[Place]) -> tuple[dict[Place, Progress | None], dict[Place, int]]:
        """The group's progress in each partition, and the offsets of those where it has none.

        Progress counts for nothing where a reset was asked for while nobody had the partition: what the reset leaves
        out is not to be handled first. Partitions without a leader in which the group has to begin are in neither.
        """
        places = list(places)
        self._ids.look({topic for topic, _ in places})
        known = self.committed(places)
        begins, ends = self._bounds([place for place, progress in known.items() if progress is not None])
        moved: dict[Place, Start] = self._cut(known, ends)
        for place, progress in known.items():
            if progress is not None and place in begins and place not in moved:
                tell_deleted(self._plan.group, place, progress.offset, begins[place], progress.done)
        for place, progress in known.items():
            if progress is not None:
                self._starts.pop(place, None)
            reset = self._orders.control.reset_of(place[0])
            if progress is not None and reset is not None and reset.id != progress.reset:
                log.warning("topic %s of this group goes on from %s, by reset %s", reset.topic, reset.to, reset.id)
                moved[place] = reset.start()
        known |= dict.fromkeys(moved)
        begun = self.begin([place for place, progress in known.items() if progress is None and place not in moved])
        begun |= self.offsets(moved)
        return {p: progress for p, progress in known.items() if progress is not None or p in begun}, begun

    def _cut(self, known: Mapping[Place, Progress | None], ends: Mapping[Place, int]) -> dict[Place, Start]:
        """Partitions of topics that were made anew, and those that end before the group's offset: led by a broker that
        lacks the last records, say.

        What is there by now has other offsets: it begins at the earliest, and may be handled again.
        """
        cut: dict[Place, Start] = {}
        for place, progress in known.items():
            end, topic_id = ends.get(place), self._ids.of(place[0])
            if progress is not None and progress.topic and topic_id and progress.topic != topic_id:
                log.warning("topic %s was made anew: group %s begins anew there", place[0], self._plan.group)
                cut[place] = "earliest"
            elif progress is not None and end is not None and end < progress.offset:
                log.warning(
                    "topic %s ends at %d in partition %d, where group %s was at %d: it was made anew, or its last "
                    "records are lost; the group begins anew there", place[0], end, place[1], self._plan.group,
                    progress.offset,
                )  # fmt: skip
                cut[place] = "earliest"
        return cut

    def look_behind(self, jumps: Mapping[Place, tuple[int, int]]) -> None:
        """Say what was deleted of these offsets, which brought no record: the client itself passes over it."""
        begins, _ = self._bounds(jumps)
        for place, begin in begins.items():
            start, end = jumps[place]
            tell_deleted(self._plan.group, place, start, min(begin, end))

    def _bounds(self, places: Collection[Place]) -> tuple[dict[Place, int], dict[Place, int]]:
        """Where those of the partitions begin and end that have a leader, as far as the brokers tell it.

        The ends are behind open transactions.
        """
        led = self._with_leader(places)
        if not led:
            return {}, {}
        admin = self._cluster.admin()
        answers = [
            admin.list_offsets({TopicPartition(*place): wanted for place in led}, request_timeout=CALL_SECONDS)
            for wanted in (OffsetSpec.earliest(), OffsetSpec.latest())  # type: ignore[no-untyped-call]
        ]
        bounds: tuple[dict[Place, int], dict[Place, int]] = {}, {}
        for offsets, each in zip(bounds, answers, strict=True):
            for p, answer in each.items():
                with contextlib.suppress(KafkaException):
                    offsets[p.topic, p.partition] = offset_of(answered(answer, CALL_SECONDS))
        return bounds

    def begin(self, places: Iterable[Place]) -> dict[Place, int]:
        """The offsets where partitions without progress begin; those without a leader are left out."""
        starts: dict[Place, Start] = {place: self._starts.get(place, "earliest") for place in self._led(places)}
        return self._offsets(starts | self._forgotten(starts))

    def _forgotten(self, places: Collection[Place]) -> dict[Place, Start]:
        """Where the group was in those of the partitions that it has read before."""
        if self._noted is None or not places:
            return {}
        try:
            last: dict[Place, tuple[int, str]] = {(p.topic, p.partition): at for p, at in self._noted.last().items()}
        except NotifyError as error:
            log.warning("whether group %s was here before cannot be read: %s", self._plan.group, error)
            return {}
        known = {place: last[place][0] for place in places if place in last}
        if not known:
            return {}
        log.warning(
            "Kafka has forgotten the offsets of group %s in %d partitions (offsets.retention.minutes): it goes on "
            "where that was noted last, and what it handled later comes again",
            self._plan.group,
            len(known),
        )
        ends = self._listed({place: OffsetSpec.latest() for place in known})  # type: ignore[no-untyped-call]
        self._ids.look({topic for topic, _ in known})

        def is_anew(place: Place) -> bool:
            noted, topic_id = last[place][1], self._ids.of(place[0])
            return known[place] > ends[place] or bool(noted and topic_id and noted != topic_id)

        # A topic that ends before that, or has another id, was deleted and made anew.
        return {place: "earliest" if is_anew(place) else at for place, at in known.items()}

    def offsets(self, wanted: Mapping[Place, Start]) -> dict[Place, int]:
        """The offset of each start. An instant after the last record is the end; an offset is kept within the bounds.

        The end is before the first transaction that is open: what commits later is not passed. Partitions without a
        leader are left out.
        """
        return self._offsets({place: wanted[place] for place in self._led(wanted)})

    def _offsets(self, wanted: Mapping[Place, Start]) -> dict[Place, int]:
        if not wanted:
            return {}
        lows = self._listed({place: OffsetSpec.earliest() for place in wanted})  # type: ignore[no-untyped-call]
        ends = self._listed({place: OffsetSpec.latest() for place in wanted})  # type: ignore[no-untyped-call]
        instants = {
            place: OffsetSpec.for_timestamp(round(start.timestamp() * 1000))
            for place, start in wanted.items()
            if isinstance(start, datetime)
        }
        by_time = self._listed(instants)
        offsets = {}
        for place, start in wanted.items():
            if isinstance(start, datetime):
                offsets[place] = by_time[place] if by_time[place] >= 0 else ends[place]
            elif isinstance(start, int):
                offsets[place] = min(max(start, lows[place]), ends[place])
            else:
                offsets[place] = lows[place] if start == "earliest" else ends[place]
        return offsets

    def _listed(self, wanted: Mapping[Place, OffsetSpec]) -> dict[Place, int]:
        if not wanted:
            return {}
        asked = {TopicPartition(*place): spec for place, spec in wanted.items()}
        # A client of its own: one that goes on believes in the partitions and leaders that it met first.
        admin = self._cluster.admin()
        answers = admin.list_offsets(asked, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=CALL_SECONDS)
        return {(p.topic, p.partition): offset_of(answered(answer, CALL_SECONDS)) for p, answer in answers.items()}

    def _led(self, places: Iterable[Place]) -> list[Place]:
        """Those of the partitions that have a leader. Raises KafkaException while another may still get one soon."""
        asked = list(places)
        led = self._with_leader(asked)
        waiting = [place for place in asked if place not in led]
        now = time.monotonic()
        self._leaderless = {place: since for place, since in self._leaderless.items() if place not in led}
        for place in waiting:
            self._leaderless.setdefault(place, now)
            if self._starts.get(place) == "latest":  # what comes from now on is not passed
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
        return [place for place in asked if place in led]

    def _with_leader(self, places: Collection[Place]) -> set[Place]:
        """Those of the partitions that have a leader now."""
        if not places:
            return set()
        topics = self._cluster.admin().list_topics(timeout=CALL_SECONDS).topics
        return {
            (name, n)
            for name, n in places
            if name in topics and n in topics[name].partitions and topics[name].partitions[n].leader >= 0
        }


def tell_deleted(group: str, place: Place, position: int, begin: int, done: Collection[int] = ()) -> None:
    """Say that the brokers have deleted what a group was to handle next, if a partition begins behind its position.

    `done`: offsets behind the position that are done. Markers of Kafka's transactions have offsets, too.
    """
    gone = begin - position - sum(offset < begin for offset in done)
    if gone > 0:
        log.error(
            "up to %d messages of topic %s, partition %d, were deleted before group %s handled them: the topic keeps "
            "messages for a shorter time (retention.ms, retention.bytes) than the group was behind. It goes on at %d",
            gone, place[0], place[1], group, begin,
        )  # fmt: skip
