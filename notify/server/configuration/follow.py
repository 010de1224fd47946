"""Follows what servers share: settings and credentials that were changed here or at another server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog
from sqlalchemy.engine import Engine
from sqlalchemy.exc import DBAPIError

from notify import faults
from notify.clock import Clock
from notify.errors import NotifyError, Unavailable
from notify.server.access.credential import Credential
from notify.server.access.gate import Access, provider_of
from notify.server.configuration.first_token import leave_first_token
from notify.server.configuration.last_known import Known, LastKnown
from notify.server.configuration.records import CREDENTIALS, SETTINGS, Records
from notify.server.configuration.revisions import Configuration, Revision
from notify.server.tasks import ended, repeated
from notify.settings import Settings
from notify.threads import in_thread
from notify.wire import instant

log = structlog.get_logger("notify.server")

LOOK_SECONDS = 1.0
LOOK_BOUND_SECONDS = 5.0
"""A look that takes longer is given up, so that a database that hangs does not stop all later ones."""
LOOK_THREADS = 4
"""Looks have threads of their own: a thread is occupied until its driver gives up, and heartbeats and checkpoints must
not wait for that."""
KEEP_EVERY_SECONDS = 60.0
"""How old at most the time is, in the file of what was known last, at which the registry said the same."""
NOTE_USED_EVERY = 60
"""Looks between two notes of when credentials were last used."""

T = TypeVar("T")


class Administration:
    """Configuration and access as the records have them; looks for what others changed, every second and on demand."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        clock: Clock,
        on_change: Callable[[Configuration], None] = lambda configuration: None,
        last_known: LastKnown | None = None,
    ) -> None:
        """`on_change` is called when other settings or limits hold. `last_known`: where to keep what is read from
        `engine`, and to read it where that does not answer at the start; None: it is this server's own file."""
        self.records = Records(engine)
        self.configuration = Configuration(settings)
        self.access = Access(settings, self.look, clock, provider_of(settings))
        self.clock = clock
        self._on_change = on_change
        self._last_known = last_known
        self._kept = 0.0
        self._credentials: Sequence[Credential] = ()
        self._versions: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None
        self._looks = 0
        self._one_look = asyncio.Lock()
        self._threads = ThreadPoolExecutor(LOOK_THREADS, "notify-look")

    async def start(self, data_dir: str) -> None:
        """Read what there is, or what was known last. With access on and no credential yet, a first token is left in
        `data_dir`.

        Raises StorageFailed where the database does not answer, and what was known last is missing or too old.
        """
        try:
            if self.access.on:
                await in_thread(leave_first_token, self.records, Path(data_dir), self.clock())
            await self._follow()
        except faults.DATABASE_AWAY as error:
            if self._last_known is None:
                raise
            reason = str(error.orig or error)[:300] if isinstance(error, DBAPIError) else str(error)[:300]
            known = await in_thread(self._last_known.read, self.clock(), self.access.on, reason)
            log.warning("registry_is_away", reason=reason, known_at=instant(known.at_us))
            self._learn(known.credentials)
            self.hold(known.revision)
        looking = repeated(self._look_and_note, lambda: LOOK_SECONDS, "look_failed")
        self._task = asyncio.get_running_loop().create_task(looking)

    async def look(self) -> None:
        """Follow what was changed before this call. Raises what the database says, Unavailable where it hangs."""
        # One after the other: an older list of credentials must not replace a newer one.
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
        is_same, self._versions = versions == self._versions, versions
        if self._last_known is not None and not (is_same and time.monotonic() < self._kept + KEEP_EVERY_SECONDS):
            self._kept = time.monotonic()
            known = Known(self.clock(), self.configuration.revision, list(self._credentials))
            await in_thread(self._last_known.keep, known)

    def _learn(self, credentials: Sequence[Credential]) -> None:
        self._credentials = credentials
        self.access.learn(credentials)

    async def _read(self, read: Callable[[], T]) -> T:
        """The result of a call of the records."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, read)

    def hold(self, revision: Revision) -> None:
        """Follow a revision; one that this server cannot follow is said in the log, and what held before holds on."""
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
        """The next revision with this document; it holds here at once, and at the other servers within a second or so.

        Raises Conflict where another was made meanwhile.
        """
        after = self.configuration.revision.number
        made = await in_thread(self.records.add_revision, self.clock(), who, reason, document, after)
        self.hold(made)
        return made

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
        # A look that is under way may still read a database of the directory; one that hangs is left behind.
        shut = partial(self._threads.shutdown, cancel_futures=True)
        await asyncio.wait([asyncio.get_running_loop().run_in_executor(None, shut)], timeout=LOOK_BOUND_SECONDS)
        self.access.close()
