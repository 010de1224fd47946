"""A principal: a name, its rights, and how much it may ask for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from notify.errors import Backpressure, Forbidden, Unauthorized
from notify.server.access.rights import Right
from notify.server.rate import TokenBucket

REMEMBERED = 1_000
"""Answers to `may` that a principal keeps."""
LONGEST = 127
"""The most characters of the name of a topic, group or source (see `check_name`); a longer one names nothing."""


ENDED = "this token was revoked, or its rights were changed, while the request waited"


class Quota:
    """How much one principal may ask for, whatever it shows: of several tokens of one subject, all share it."""

    __slots__ = ("_bucket", "_polls", "polls", "requests")

    def __init__(self, requests: float = 0, polls: int = 0, now_us: int = 0) -> None:
        """`requests` a second and `polls` at once; 0: no bound."""
        self.requests = requests
        self.polls = polls
        self._bucket = TokenBucket(requests, now_us) if requests else None
        self._polls = 0

    def take_request(self, now_us: int, name: str) -> None:
        """One more request. Raises Backpressure above its rate."""
        if self._bucket is not None:
            self._bucket.admit(now_us, f"{name} may send {self.requests:g} requests/s")

    def begin_poll(self, name: str) -> None:
        """A request that waits for something to hand out. Raises Backpressure where too many wait already."""
        if self.polls and self._polls >= self.polls:
            raise Backpressure(f"{name} has {self._polls} polls waiting, and may have {self.polls}", "too_many_polls")
        self._polls += 1

    def end_poll(self) -> None:
        self._polls -= 1


class Principal:
    """Who asks. Kept while its record is unchanged, so that its quota holds from request to request."""

    __slots__ = ("_answers", "_waiting", "is_over", "name", "quota", "rights")

    def __init__(self, name: str, rights: Sequence[Right] | None, quota: Quota | None = None) -> None:
        """`rights` None: everything. `quota` None: no bound."""
        self.name = name
        self.rights = rights
        self.quota = quota or Quota()
        self.is_over = False
        """Its credential was revoked or changed: this is nobody any more."""
        self._waiting: set[Callable[[], object]] = set()
        self._answers: dict[tuple[str, str, str], bool] = {}

    def end(self) -> None:
        """Take all its rights, and end the requests that wait in its name."""
        self.is_over = True
        self.rights = ()
        self._answers.clear()
        for give_up in list(self._waiting):
            give_up()

    @contextlib.contextmanager
    def waiting(self, give_up: Callable[[], object]) -> Iterator[None]:
        """While a request waits for something to hand out: `give_up` is called if the principal ends meanwhile.

        Raises Backpressure where too many wait already.
        """
        self.quota.begin_poll(self.name)
        self._waiting.add(give_up)
        try:
            yield
        finally:
            self._waiting.discard(give_up)
            self.quota.end_poll()

    def may(self, action: str, name: str = "*", topic: str = "*") -> bool:
        """Whether it may do this; with `*` as a name, to everything."""
        if self.rights is None:
            return True
        if len(name) > LONGEST or len(topic) > LONGEST:
            return False
        asked = (action, name, topic)
        answer = self._answers.get(asked)
        if answer is None:
            answer = any(right.covers(action, name, topic) for right in self.rights)
            if len(self._answers) >= REMEMBERED:
                self._answers.clear()
            self._answers[asked] = answer
        return answer

    def check(self, action: str, name: str = "*", topic: str = "*", called: str = "") -> None:
        """Raises Forbidden with the right that it lacks, Unauthorized where it has ended.

        `called`: words in place of a name that the request did not have; whoever lacks the right is not told it.
        """
        if not self.may(action, name, topic):
            self.refuse_if_over()
            right = f"{action} for {called}" if called else str(Right(action, name, topic))[:300]
            raise Forbidden(f"{self.name} lacks the right {right}: an administrator can grant it")

    def may_some(self, action: str, name: str | None = None, topic: str | None = None) -> bool:
        """Whether it may do this to anything: with `name` on any topic, with `topic` as anyone."""
        if self.rights is None:
            return True
        if len(name or "") > LONGEST or len(topic or "") > LONGEST:
            return False
        return any(
            r.action == action
            and r.covers(action, r.name if name is None else name, r.topic if topic is None else topic)
            for r in self.rights
        )

    def check_some(self, action: str, name: str | None = None) -> None:
        """Raises as `check` where it may do this to nothing at all, or with `name` on no topic."""
        if not self.may_some(action, name):
            self.refuse_if_over()
            what = action if name is None else f"{action}:{name[:LONGEST]}"
            raise Forbidden(f"{self.name} lacks every right to {what}: an administrator can grant one")

    def refuse_if_over(self) -> None:
        """Raises Unauthorized where its credential ended since it was let in: another may be good."""
        if self.is_over:
            raise Unauthorized(ENDED)

    def take_request(self, now_us: int) -> None:
        """One more request. Raises Backpressure above its rate, Unauthorized where it has ended."""
        self.refuse_if_over()
        self.quota.take_request(now_us, self.name)


EVERYONE = Principal("anyone", None)
"""While access is off: whoever can reach this machine's loopback."""
NOBODY = Principal("nobody", ())
"""Who has shown nothing that was looked at."""
UNVERIFIED = Principal("unverified", ())
"""Who has shown something that is being looked at."""
