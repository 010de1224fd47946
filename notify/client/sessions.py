"""A consumer's sessions: one with each queue server that the registry names, begun and ended as servers come and go."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl

from notify.client.banner import stopping_text
from notify.client.handlers import refuse_offsets
from notify.client.http import HttpClient
from notify.client.keeping import Keeping
from notify.client.login import Token
from notify.client.servers import Servers
from notify.client.session import Session, Work
from notify.errors import NotifyError

log = logging.getLogger("notify.consumer")

MEMBERS_SECONDS = 2.0
"""How often a consumer looks whether queue servers were added or removed."""


class Sessions:
    """Those of one consumer. Belongs to one event loop; `run` it once."""

    def __init__(self, work: Work, url: str, token: Token, tls: ssl.SSLContext | None) -> None:
        """Raises InvalidRequest for what is no server's address."""
        self._work = work
        self._token, self._tls = token, tls
        self._servers = Servers(url, "queue", tls=tls, token=token)
        self._sessions: dict[str, tuple[Session, asyncio.Task[None]]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        """The tasks of sessions with servers that the registry names no more."""

    async def run(self, inbox: Keeping | None, stopping: asyncio.Event) -> None:
        """Until `stopping`, and then until what is under way is settled. `inbox` is kept beside the sessions.

        Raises what ends a session and cannot be mended by trying again.
        """
        keeping: asyncio.Task[None] | None = None
        if inbox is not None:
            self._work.inbox_from = await inbox.whole_from()
            keeping = asyncio.ensure_future(inbox.run(self._work, self._sessions))
            keeping.add_done_callback(_log_failure)
        stopped = asyncio.ensure_future(stopping.wait())
        failed: list[BaseException] = []
        try:
            while not (stopping.is_set() or failed):
                await self._follow_registry()
                tasks = [task for _, task in self._sessions.values()]
                await asyncio.wait([stopped, *tasks], timeout=MEMBERS_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                # A failure that trying again cannot mend ends the consumer.
                failed = [error for task in tasks if task.done() and (error := task.exception()) is not None]
            if keeping is not None:
                keeping.cancel()
            await self._drain()
            tasks = [task for _, task in self._sessions.values()]
            failed += [e for task in tasks if (e := task.exception()) is not None and e not in failed]
        finally:
            stopped.cancel()
            await self._cancel([] if keeping is None else [keeping])
        if failed:
            raise failed[0]

    async def _follow_registry(self) -> None:
        """Begin a session with each server that is new, and have those of servers that left come to their end."""
        servers, sessions = self._servers, self._sessions
        with contextlib.suppress(NotifyError):  # a session says more clearly that nobody answers
            await servers.refresh()
        refuse_offsets(self._work.handlers.values(), servers.keys)
        for url in [url for url in servers.urls() if url not in sessions]:
            session = Session(self._work, HttpClient(url, tls=self._tls, token=self._token))
            sessions[url] = session, asyncio.ensure_future(session.run())
        for url in sessions.keys() - set(servers.urls()):
            log.warning("the registry does not name %s any more: nothing more is received from there", url)
            session, task = sessions.pop(url)
            session.end()
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
            task.add_done_callback(_log_failure)

    async def _drain(self) -> None:
        work = self._work
        for session, _ in self._sessions.values():
            session.end()
        if work.in_hand:
            work.announce(stopping_text(work.drain, len(work.in_hand)))
        ending = [*(task for _, task in self._sessions.values()), *self._leaving]
        if ending:
            await asyncio.wait(ending)

    async def _cancel(self, others: list[asyncio.Task[None]]) -> None:
        ending = [*(task for _, task in self._sessions.values()), *self._leaving, *others]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await self._servers.aclose()


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.warning("a task of the consumer has failed", exc_info=task.exception())
