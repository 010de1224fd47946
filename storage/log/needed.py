"""Finds the entries of a part that are still needed: unsettled, delayed, or dead letters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from notify.storage.log.rewrite import still_delayed
from notify.storage.log.sealed import SealedPart
from notify.storage.log.state import LogState
from notify.storage.names import DEAD_LETTER_PREFIX, redriven_id

LETTERS_AT_ONCE = 256


class Needed:
    """Retention asks this for one part after another."""

    def __init__(self, state: LogState) -> None:
        self._state = state

    def groups_by_topic(self) -> dict[int, list[str]]:
        """The groups whose unsettled messages are kept, by topic number."""
        groups: dict[int, list[str]] = {}
        for (group, name), subscription in self._state.subscriptions.items():
            if subscription.mode != "broadcast":  # its instances have subscriptions of their own
                groups.setdefault(self._state.topics[name].id, []).append(group)
        return groups

    def mask(self, part: SealedPart, letters: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which entries of a part are unsettled by a subscribed group, are dead `letters`, or are still delayed."""
        mask = letters.copy()
        state = self._state
        groups = self.groups_by_topic()
        for run in part.runs:
            topic_id, queue = int(run["key"]) >> 16, int(run["key"]) & 0xFFFF
            first, count = int(run["first_entry"]), int(run["count"])
            offsets = part.entries["offset"][first : first + count]
            for group in groups.get(topic_id, ()):
                progress = state.group_progress(group, topic_id, queue)
                start = max(progress.floor, state.topics_by_id[topic_id].queues[queue].start)
                waiting = offsets >= np.uint64(start)
                if progress.settled:
                    waiting &= ~progress.settled.mask(offsets)
                mask[first : first + count] |= waiting
        mask[still_delayed(state, part)] = True
        return mask

    # --- dead letters -----------------------------------------------------------------------------------------

    async def letters(self, part: SealedPart) -> NDArray[np.bool_]:
        """Which entries of a part are dead letters that wait to be redriven or purged."""
        mask = np.zeros(part.count, bool)
        for first, count in self._letter_runs(part):
            for number in range(first, first + count):
                mask[number] = not self._is_sent_again(part, number)
                if number % LETTERS_AT_ONCE == 0:
                    await asyncio.sleep(0)  # there may be very many: let producers and consumers run
        return mask

    def has_letters(self, part: SealedPart) -> bool:
        """Whether any dead letter of a part still waits."""
        runs = self._letter_runs(part)
        return any(not self._is_sent_again(part, n) for first, count in runs for n in range(first, first + count))

    def _letter_runs(self, part: SealedPart) -> Iterator[tuple[int, int]]:
        """(number of the first entry, count) of the dead letters in a part whose topic has no retention of its own, and
        that were not purged."""
        for run in part.runs:
            topic = self._state.topics_by_id.get(int(run["key"]) >> 16)
            if topic is None or topic.deleted or topic.policy.retention_us:
                continue
            if not topic.name.startswith(DEAD_LETTER_PREFIX):
                continue
            first, count = int(run["first_entry"]), int(run["count"])
            start = topic.queues[int(run["key"]) & 0xFFFF].start
            purged = int(np.searchsorted(part.entries["offset"][first : first + count], np.uint64(start)))
            if purged < count:
                yield first + purged, count - purged

    def _is_sent_again(self, part: SealedPart, number: int) -> bool:
        entry = part.entries[number]
        transaction_id = int(entry["id_high"]).to_bytes(8) + int(entry["id_low"]).to_bytes(8)
        topic, offset = self._state.topics_by_id[int(entry["topic"])].name, int(entry["offset"])
        return self._state.parts.outcome(redriven_id(topic, transaction_id, offset)) is not None
