"""Noting: notes attempts in Kafka before they begin, in partitions whose last consumer died or was cut off.

A message that kills its process never gets a result. Without a note each attempt would count as its first, and it would
kill every consumer. One commit notes the attempts of many messages; partitions whose last consumer ended properly need
no notes. An orphan, whose last attempt ended with its process, is tried alone, so that no other message is suspected.
"""

from __future__ import annotations

import asyncio

from notify.client.kafka.handling import Handling
from notify.client.kafka.partitions import Partitions
from notify.client.kafka.settling import RETRY_MAX_SECONDS, RETRY_SECONDS, Settling
from notify.client.kafka.window import Item, Window
from notify.runtime.backoff import Backoff


class Noting:
    """Notes attempts for one consumer. Belongs to the event loop."""

    def __init__(self, partitions: Partitions, settling: Settling, handling: Handling) -> None:
        self._partitions = partitions
        self._settling = settling
        self._handling = handling

    async def run(self) -> None:
        """Note attempts until cancelled. Raises errors that a retry cannot mend."""
        while True:
            await self._handling.noting.wait()
            self._handling.noting.clear()
            noted = self._note()
            if noted:
                await self._commit()
                for window, items in noted:
                    window.noted(items)
                    self._partitions.look(window)
                self._handling.begin()

    async def _commit(self) -> None:
        backoff = Backoff(RETRY_SECONDS, RETRY_MAX_SECONDS)
        while True:
            if await self._settling.settle():
                return
            await asyncio.sleep(backoff.next())

    def _note(self) -> list[tuple[Window, list[Item]]]:
        """The items whose attempts are to be noted: as many as can begin now, but an orphan alone. If the process dies,
        all noted messages have used up an attempt."""
        windows = [window for _, window in self._partitions.items()]
        room = self._handling.room
        orphaned = [window for window in windows if window.has_orphan_to_note]
        if any(window.tries_orphan for window in windows) or (orphaned and any(window.tries for window in windows)):
            room = 0
        elif orphaned:
            windows, room = orphaned[:1], min(room, 1)
        noted: list[tuple[Window, list[Item]]] = []
        for window in windows:
            items = window.note(room)
            room -= len(items)
            noted += [(window, items)] if items else []
        self._partitions.has_to_note = any(window.has_to_note for _, window in self._partitions.items())
        return noted
