"""Operators' requests to consumer groups over Kafka to pause or to be reset: the records of the topic `notify-control`.

The topic is compacted and has one partition. A record's key is the group, its value JSON: `{"paused": true, "resets":
[{"id": "…", "topic": "…", "to": "earliest"}]}`. A record has all current requests to its group: a new record repeats
those of the earlier record that still hold. Consumers obey within OBEY_SECONDS. The owner of each partition of a
reset's topic carries the reset out once, and stores its id with its progress (progress.py).
"""

from __future__ import annotations

import re
from datetime import datetime

import msgspec

from notify.errors import InvalidRequest
from notify.kafka.progress import MOST_ID_CHARACTERS
from notify.kafka.table import KafkaTable
from notify.protocol.wire import UNDECODABLE

TOPIC = "notify-control"
OBEY_SECONDS = 5.0
_ID = re.compile(rf"[A-Za-z0-9._-]{{1,{MOST_ID_CHARACTERS}}}\Z")


class Reset(msgspec.Struct, frozen=True):
    """A reset. `to`: `earliest`, `latest`, an instant (RFC 3339 with a zone), or an offset, used in each partition."""

    id: str
    topic: str
    to: str | int

    def start(self) -> str | int | datetime:
        """The new position. Raises InvalidRequest if `to` is not a position."""
        if isinstance(self.to, int):
            if self.to < 0:
                raise InvalidRequest(f"a reset goes to an offset from 0 on, not to {self.to}", "out_of_bounds")
            return self.to
        if self.to in ("earliest", "latest"):
            return self.to
        try:
            at = datetime.fromisoformat(self.to)
        except ValueError:
            at = None
        if at is None or at.tzinfo is None:
            raise InvalidRequest(f"a reset goes to earliest, latest, an instant or an offset, not to {self.to[:60]!r}")
        return at


class Control(msgspec.Struct, frozen=True, omit_defaults=True):
    """All current requests to a group. `resets`: the last reset of each topic."""

    paused: bool = False
    resets: tuple[Reset, ...] = ()

    def reset_of(self, topic: str) -> Reset | None:
        return next((reset for reset in self.resets if reset.topic == topic), None)

    def encoded(self) -> bytes:
        """The record's value. Raises InvalidRequest for a reset that consumers could not carry out."""
        for reset in self.resets:
            reset.start()
            if _ID.match(reset.id) is None:
                raise InvalidRequest(f"the id of a reset is 1 to {MOST_ID_CHARACTERS} of A-Z a-z 0-9 . _ -")
        return msgspec.json.encode(self)

    @classmethod
    def of(cls, value: bytes | None) -> Control:
        """The requests in a record's value; a tombstone has none. Raises InvalidRequest if it cannot be read."""
        if not value:
            return cls()
        try:
            control = msgspec.json.decode(value, type=cls)
        except UNDECODABLE as error:
            raise InvalidRequest(f"a record of {TOPIC} cannot be read: {error}") from None
        control.encoded()
        return control


CONTROL: KafkaTable[str, Control] = KafkaTable(TOPIC, Control.encoded, Control.of)
"""The requests by group."""
