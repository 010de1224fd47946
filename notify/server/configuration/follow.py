"""Follows the settings, credentials and schedules that servers share, so that each server sees every change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog
from sqlalchemy.engine import Engine
from sqlalchemy.exc import DBAPIError

from notify.errors import NotifyError, Unavailable
from notify.protocol.wire import instant
from notify.runtime import faults
from notify.runtime.clock import Clock
from notify.runtime.threads import in_thread
from notify.server.access.credential import Credential
from notify.server.access.gate import Access, provider_of
from notify.server.configuration.first_token import leave_first_token
from notify.server.configuration.last_known import Known, LastKnown
from notify.server.configuration.records import CREDENTIALS, SETTINGS, Records
from notify.server.configuration.revisions import Configuration, Revision
from notify.server.schedules.records import SCHEDULES
from notify.server.settings import Settings
from notify.server.tasks import ended, repeated

log = structlog.get_logger("notify.server")

LOOK_SECONDS = 1.0
LOOK_BOUND_SECONDS = 5.0
"""A look that takes longer is given up, so that a hanging database does not stop all later looks."""
LOOK_THREADS = 4
"""Looks have their own threads: a look occupies its thread until the driver gives up, and heartbeats and checkpoints
must not wait for that."""
KEEP_EVERY_SECONDS = 60.0
"""How often the file of LastKnown is written although nothing has changed, so that its time stays recent."""
NOTE_USED_EVERY = 60
"""The number of looks between two records of when credentials were last used."""

T = TypeVar("T")


class Administration:
    """Configuration and access as recorded; looks for changes by other servers every second and on demand."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        clock: Clock,
        on_change: Callable[[Configuration], None] = lambda configuration: None,
        last_known: LastKnown | None = None,
        follow_schedules: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`on_change` is called after settings or limits have changed, `follow_schedules` when schedules have.

        `last_known` keeps what was read from `engine`, for a start at which that database does not answer; None: the
        database is this server's own file.
        """
        self.records = Records(engine)
        self.configuration = Configuration(settings)
        self.access = Access(settings, self.look, clock, provider_of(settings))
        self.clock = clock
        self._on_change = on_change
        self._last_known = last_known
        self._follow_schedules = follow_schedules
        self._kept_at = 0.0
        self._credentials: Sequence[Credential] = ()
        self._versions: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None
        self._looks = 0
        self._one_look = asyncio.Lock()
        self._threads = ThreadPoolExecutor(LOOK_THREADS, "notify-look")

    async def start(self, data_dir: str) -> None:
        """Read the records, or the file of LastKnown if the database does not answer, and begin to look for changes.

        With access on and no credential yet, a first token is written into `data_dir`. Raises StorageFailed if the
        database does not answer and the file is missing or too old.
        """
        try:
            if self.access.on:
                await in_thread(leave_first_token, self.records, Path(data_dir), self.clock())
            await self._follow()
        except faults.DATABASE_AWAY as error:
            if self._last_known is None:
                raise
            reason = str(error.orig or error)[:300] if isinstance(error, DBAPIError) else str(error)[:300]
            last_known = await in_thread(self._last_known.read, self.clock(), self.access.on, reason)
            log.warning("registry_is_away", reason=reason, known_at=instant(last_known.at_us))
            self._learn(last_known.credentials)
            self.hold(last_known.revision)
        looking = repeated(self._look_and_note, lambda: LOOK_SECONDS, "look_failed")
        self._task = asyncio.get_running_loop().create_task(looking)

    async def look(self) -> None:
        """Follow all changes made before this call. Raises the database's errors; Unavailable if it hangs."""
        # One look at a time: an older list of credentials must not replace a newer one.
        async with self._one_look:
            try:
                async with asyncio.timeout(LOOK_BOUND_SECONDS):
                    await self._follow()
            except TimeoutError:
                raise Unavailable("the database did not answer in time; try again") from None

    async def _follow(self) -> None:
        versions = await self._read(self.records.versions)
        if versions.get(CREDENTIALS) != self._versions.get(CREDENTIALS):
            self._learn(await self._read(self.records.credentials))
        if versions.get(SETTINGS) != self._versions.get(SETTINGS):
            self.hold(await self._read(self.records.revision))
        if self._follow_schedules is not None and versions.get(SCHEDULES) != self._versions.get(SCHEDULES):
            await self._follow_schedules()
        is_same, self._versions = versions == self._versions, versions
        if self._last_known is not None and not (is_same and time.monotonic() < self._kept_at + KEEP_EVERY_SECONDS):
            self._kept_at = time.monotonic()
            last_known = Known(self.clock(), self.configuration.revision, list(self._credentials))
            try:
                await in_thread(self._last_known.keep, last_known)
            except OSError as error:  # full, or gone: it matters at a start, not to what is asked now
                log.warning("registry_not_kept", reason=str(error)[:300])

    def _learn(self, credentials: Sequence[Credential]) -> None:
        self._credentials = credentials
        self.access.learn(credentials)

    async def _read(self, read: Callable[[], T]) -> T:
        """The result of a function of the records, called in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, read)

    def hold(self, revision: Revision) -> None:
        """Follow a revision. If this server cannot follow it, it logs that and keeps its present settings."""
        if revision.number <= self.configuration.revision.number:
            return
        try:
            self.configuration.hold(revision)
        except (NotifyError, TypeError) as error:
            log.error("revision_refused", revision=revision.number, reason=str(error)[:300])
            return
        self.access.configure(self.configuration.settings)
        self._on_change(self.configuration)
        log.info("settings_changed", revision=revision.number, who=revision.who)

    async def revise(self, who: str, reason: str, document: dict[str, Any]) -> Revision:
        """Make the next revision with this document. This server follows it immediately, others in about a second.

        Raises Conflict if another revision was made in the meantime.
        """
        after = self.configuration.revision.number
        revision = await in_thread(self.records.add_revision, self.clock(), who, reason, document, after)
        self.hold(revision)
        return revision

    async def _look_and_note(self) -> None:
        self._looks += 1
        await self.look()
        if self._looks % NOTE_USED_EVERY == 0:
            await self._note_used()

    async def _note_used(self) -> None:
        used, self.access.used_us = self.access.used_us, {}
        if used:
            await in_thread(self.records.note_used, used)

    async def stop(self) -> None:
        if self._task is not None:
            await ended(self._task)
            try:
                await self._note_used()
            except Exception as error:
                faults.note("use_not_noted", error)
        # Wait for a running look, which may still read a database of the directory, but not for a hanging one.
        shutdown = partial(self._threads.shutdown, cancel_futures=True)
        await asyncio.wait([asyncio.get_running_loop().run_in_executor(None, shutdown)], timeout=LOOK_BOUND_SECONDS)
        self.access.close()
