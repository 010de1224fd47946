"""Operators ask consumer groups over Kafka to pause or to go back: the records of the topic `notify-control`.

The topic is compacted and has one partition. A record's key is the group, its value JSON: `{"paused": true, "resets":
[{"id": "…", "topic": "…", "to": "earliest"}]}`. A record holds all that is asked of its group at that time: whoever
writes one keeps of the earlier record what still counts. Consumers obey within OBEY_SECONDS. The owner of each
partition of a reset's topic carries it out once, and keeps its id with its progress (progress.py).
"""

from __future__ import annotations

import re
from datetime import datetime

import msgspec

from notify.errors import InvalidRequest
from notify.kafka.progress import MOST_ID_CHARACTERS

TOPIC = "notify-control"
OBEY_SECONDS = 5.0
_ID = re.compile(rf"[A-Za-z0-9._-]{{1,{MOST_ID_CHARACTERS}}}\Z")


class Reset(msgspec.Struct, frozen=True):
    """`to`: `earliest`, `latest`, an instant (RFC 3339 with its zone), or an offset that holds for each partition."""

    id: str
    topic: str
    to: str | int

    def start(self) -> str | int | datetime:
        """Where to go to. Raises InvalidRequest for what is none of these."""
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
    """All that is asked of a group. `resets`: at most one for each topic, the last one."""

    paused: bool = False
    resets: tuple[Reset, ...] = ()

    def reset_of(self, topic: str) -> Reset | None:
        return next((reset for reset in self.resets if reset.topic == topic), None)

    def encoded(self) -> bytes:
        """The record's value. Raises InvalidRequest for a reset that no consumer could carry out."""
        for reset in self.resets:
            reset.start()
            if _ID.match(reset.id) is None:
                raise InvalidRequest(f"the id of a reset is 1 to {MOST_ID_CHARACTERS} of A-Z a-z 0-9 . _ -")
        return msgspec.json.encode(self)

    @classmethod
    def of(cls, value: bytes | None) -> Control:
        """The wishes of a record; a tombstone asks for nothing. Raises InvalidRequest for one that cannot be read."""
        if not value:
            return cls()
        try:
            control = msgspec.json.decode(value, type=cls)
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"a record of {TOPIC} cannot be read: {error}") from None
        control.encoded()
        return control
