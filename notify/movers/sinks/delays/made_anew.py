"""Notices that a topic of the wheels was deleted and made again while its slots are read."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

from confluent_kafka import KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient

LOOK_SECONDS = 1.0


class MadeAnew:
    """The ids of the wheels' topics since a membership began: a topic that is made again gets another id."""

    def __init__(self, admin: AdminClient, topics: Collection[str]) -> None:
        self._admin = admin
        self._topics = TopicCollection(sorted(topics))
        self._ids: dict[str, str] = {}
        self._asked: Mapping[str, Any] = {}
        self._asked_at = float("-inf")

    def look(self) -> str:
        """The name of a topic that was made anew; empty if none is known.

        Does not wait: it asks every LOOK_SECONDS, and a later call reads the answers. A topic that is missing, and one
        whose broker does not answer, keeps its id.
        """
        if all(answer.done() for answer in self._asked.values()):
            for name, answer in self._asked.items():
                try:
                    topic_id = str(answer.result().topic_id)
                except KafkaException:
                    continue
                if self._ids.setdefault(name, topic_id) != topic_id:
                    return name
            self._asked = {}
            if time.monotonic() - self._asked_at >= LOOK_SECONDS:
                self._asked_at = time.monotonic()
                self._asked = self._admin.describe_topics(self._topics)
        return ""
