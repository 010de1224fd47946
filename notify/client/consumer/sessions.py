"""Sessions: a consumer's session with each queue server, begun and ended as the registry adds and removes servers."""

from __future__ import annotations

import asyncio
import contextlib
import ssl

from notify.client.consumer.inbox_maintenance import InboxMaintenance
from notify.client.consumer.session import Session, Work
from notify.client.handling.banner import stopping_text
from notify.client.handling.handlers import refuse_offsets
from notify.client.transport.http import HttpClient
from notify.client.transport.login import Token
from notify.client.transport.servers import Servers
from notify.errors import NotifyError
from notify.runtime.program_log import program_log
from notify.runtime.signals import done_before

log = program_log("notify.consumer")

MEMBERS_SECONDS = 2.0
"""How often a consumer looks whether queue servers were added or removed."""


class Sessions:
    """The sessions of one consumer. Belongs to one event loop; `run` it once."""

    def __init__(self, work: Work, url: str, token: Token, tls: ssl.SSLContext | None) -> None:
        """Raises InvalidRequest if `url` is not the address of a server."""
        self._work = work
        self._token, self._tls = token, tls
        self._servers = Servers(url, "queue", tls=tls, token=token)
        self._sessions: dict[str, tuple[Session, asyncio.Task[None]]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        """The tasks of sessions with servers that have left the registry."""

    async def run(self, inbox: InboxMaintenance | None, stopping: asyncio.Event) -> None:
        """Receive until `stopping`, and then until all messages in hand are settled. `inbox` is kept meanwhile.

        Raises the error of a session that a retry cannot mend.
        """
        keeping: asyncio.Task[None] | None = None
        if inbox is not None and await done_before(stopping, self._learn_from(inbox)):
            keeping = asyncio.ensure_future(inbox.run(self._work, self._sessions))
            keeping.add_done_callback(_log_failure)
        stopped = asyncio.ensure_future(stopping.wait())
        failed: list[BaseException] = []
        try:
            while not (stopping.is_set() or failed):
                if not await done_before(stopping, self._follow_registry()):
                    break
                tasks = [task for _, task in self._sessions.values()]
                await asyncio.wait([stopped, *tasks], timeout=MEMBERS_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                # A session fails only with an error that a retry cannot mend, so it ends the consumer.
                failed = [error for task in tasks if task.done() and (error := task.exception()) is not None]
            if keeping is not None:
                keeping.cancel()
            await self._drain()
            tasks = [task for _, task in self._sessions.values()]
            failed += [error for task in tasks if (error := task.exception()) is not None and error not in failed]
        finally:
            stopped.cancel()
            await self._cancel([] if keeping is None else [keeping])
        if failed:
            raise failed[0]

    async def _learn_from(self, inbox: InboxMaintenance) -> None:
        self._work.inbox_from = await inbox.whole_from()

    async def _follow_registry(self) -> None:
        """Begin a session with each new server, and end the sessions with servers that have left."""
        servers, sessions = self._servers, self._sessions
        with contextlib.suppress(NotifyError):  # a session reports more clearly that no server answers
            await servers.refresh()
        refuse_offsets(self._work.handlers.values(), servers.keys)
        for url in [url for url in servers.urls() if url not in sessions]:
            session = Session(self._work, HttpClient(url, tls=self._tls, token=self._token))
            sessions[url] = session, asyncio.ensure_future(session.run())
        for url in sessions.keys() - set(servers.urls()):
            log.warning("%s has left the registry: nothing more is received from there", url)
            session, task = sessions.pop(url)
            session.end()
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
            task.add_done_callback(_log_failure)

    async def _drain(self) -> None:
        work = self._work
        for session, _ in self._sessions.values():
            session.end()
            session.give_back_waiting()
        if work.hand.under_way:
            work.announce(stopping_text(work.drain, work.hand.under_way))
        ending = [*(task for _, task in self._sessions.values()), *self._leaving]
        if ending:
            await asyncio.wait(ending)

    async def _cancel(self, others: list[asyncio.Task[None]]) -> None:
        ending = [*(task for _, task in self._sessions.values()), *self._leaving, *others]
        for task in ending:
            task.cancel()
        try:
            await asyncio.gather(*ending, return_exceptions=True)
        finally:
            self._servers.close()  # even if this wait is cancelled, too
        await self._servers.aclose()


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.warning("a task of the consumer has failed", exc_info=task.exception())
