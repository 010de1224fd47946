"""A principal: its name, its rights, and its quota."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence

from notify.errors import Backpressure, Forbidden, Unauthorized
from notify.protocol.limits import NAME_CHARACTERS
from notify.server.access.rights import Right
from notify.server.rate import TokenBucket

REMEMBERED = 1_000
"""The most answers of `may` that a principal caches."""
ENDED = "this token expired or was revoked, or its rights were changed, while the request waited"


class Quota:
    """The most requests and polls of one principal; all tokens of one subject share a quota."""

    __slots__ = ("_bucket", "_polls", "polls", "requests")

    def __init__(self, requests: float = 0, polls: int = 0, now_us: int = 0) -> None:
        """`requests` a second, and `polls` that wait at the same time; 0: no bound."""
        self.requests = requests
        self.polls = polls
        self._bucket = TokenBucket(requests, now_us) if requests else None
        self._polls = 0

    def take_request(self, now_us: int, name: str) -> None:
        """Count a request of the principal `name`. Raises Backpressure if its rate is exceeded."""
        if self._bucket is not None:
            self._bucket.admit(now_us, f"{name} may send {self.requests:g} requests/s")

    def begin_poll(self, name: str) -> None:
        """Count a poll, a request that waits for messages or checks. Raises Backpressure if too many wait already."""
        if self.polls and self._polls >= self.polls:
            raise Backpressure(f"{name} has {self._polls} polls waiting, and may have {self.polls}", "too_many_polls")
        self._polls += 1

    def end_poll(self) -> None:
        self._polls -= 1


class Principal:
    """Who sends a request. It is kept while its record is unchanged, so that its quota spans requests."""

    __slots__ = (
        "__weakref__", "_answers", "_waiting", "credential", "expires_us", "is_over", "name", "quota", "rights",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        rights: Sequence[Right] | None,
        quota: Quota | None = None,
        *,
        credential: str = "",
        expires_us: int = 0,
    ) -> None:
        """`rights` None: it may do everything. `quota` None: no bound. `credential`: the id of the credential that it
        has rights from, if any. `expires_us`: when it ends (microseconds since 1970); 0: never."""
        self.name = name
        self.rights = rights
        self.quota = quota or Quota()
        self.credential = credential
        self.expires_us = expires_us
        self.is_over = False
        """Its credential expired, or was revoked or changed, so that it has no rights any more."""
        self._waiting: set[Callable[[], object]] = set()
        self._answers: dict[tuple[str, str, str], bool] = {}

    def end(self) -> None:
        """Remove all its rights, and end its waiting requests."""
        self.is_over = True
        self.rights = ()
        self._answers.clear()
        for give_up in list(self._waiting):
            give_up()

    @contextlib.contextmanager
    def waiting(self, give_up: Callable[[], object]) -> Iterator[None]:
        """For the time that a poll waits: calls `give_up` if the principal ends meanwhile.

        Raises Backpressure if too many polls wait already.
        """
        self.quota.begin_poll(self.name)
        self._waiting.add(give_up)
        try:
            yield
        finally:
            self._waiting.discard(give_up)
            self.quota.end_poll()

    def may(self, action: str, name: str = "*", topic: str = "*") -> bool:
        """Whether it may do `action` with this name and topic; `*` means all names or topics."""
        if self.rights is None:
            return True
        if len(name) > NAME_CHARACTERS or len(topic) > NAME_CHARACTERS:
            return False
        question = (action, name, topic)
        answer = self._answers.get(question)
        if answer is None:
            answer = any(right.covers(action, name, topic) for right in self.rights)
            if len(self._answers) >= REMEMBERED:
                self._answers.clear()
            self._answers[question] = answer
        return answer

    def check(self, action: str, name: str = "*", topic: str = "*", called: str = "") -> None:
        """Raises Forbidden, with the missing right, unless it may do this; Unauthorized if it has ended.

        `called`: the error's words for a name that was not in the request, and that the caller must not learn.
        """
        if not self.may(action, name, topic):
            self.refuse_if_over()
            right = f"{action} for {called}" if called else str(Right(action, name, topic))[:300]
            raise Forbidden(f"{self.name} lacks the right {right}: an administrator can grant it")

    def may_some(self, action: str, name: str | None = None, topic: str | None = None) -> bool:
        """Whether it may do `action` with some name and topic; a `name` or `topic` that is given must match."""
        if self.rights is None:
            return True
        if len(name or "") > NAME_CHARACTERS or len(topic or "") > NAME_CHARACTERS:
            return False
        return any(
            r.action == action
            and r.covers(action, r.name if name is None else name, r.topic if topic is None else topic)
            for r in self.rights
        )

    def check_some(self, action: str, name: str | None = None) -> None:
        """Raises as `check` does unless it may do `action` with some name and topic, or with `name` on some topic."""
        if not self.may_some(action, name):
            self.refuse_if_over()
            what = action if name is None else f"{action}:{name[:NAME_CHARACTERS]}"
            raise Forbidden(f"{self.name} lacks every right to {what}: an administrator can grant one")

    def check_write(self, path: str, names: Collection[str] = ()) -> None:
        """Raises as `check` does unless it may send an administrative write. `path`: that under /v1/admin; `names`: the
        topic and the group in it, for both of which it needs the right (a subscription keeps the topic's messages); if
        there are none yet, any right will do."""
        if path.startswith(("topics/", "groups/")) and names:
            for name in names:
                self.check("admin", name)
        elif path.startswith(("topics/", "groups/", "transactions/", "jobs/")):
            self.check_some("admin")  # the route checks the group once it has read the transaction or job
        else:
            self.check("admin")

    def may_write(self, path: str, names: Collection[str] = ()) -> bool:
        """Whether `check_write` would raise nothing."""
        try:
            self.check_write(path, names)
        except (Forbidden, Unauthorized):
            return False
        return True

    def refuse_if_over(self) -> None:
        """Raises Unauthorized if its credential expired, or was revoked or changed, while the request ran."""
        if self.is_over:
            raise Unauthorized(ENDED)

    def take_request(self, now_us: int) -> None:
        """Count a request. Raises Backpressure if its rate is exceeded, Unauthorized if it has ended."""
        self.refuse_if_over()
        self.quota.take_request(now_us, self.name)


EVERYONE = Principal("anyone", None)
"""The principal of all requests while access is off."""
NOBODY = Principal("nobody", ())
"""The principal of requests without a credential that was looked at, such as on paths that need none."""
UNVERIFIED = Principal("unverified", ())
"""The principal of requests whose credential is still being verified."""
