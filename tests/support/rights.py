"""The matrix of rights: callers, their own things and another's, and the rights that each request needs.

`fnmatch` decides here whether a right covers a name, because the server's own code is under test.
"""

from __future__ import annotations

import http.client
import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import urlsplit

from tests.support.clock import PATIENCE_SECONDS
from tests.support.http import REASON
from tests.support.servers import GuardedInMemory

ANYONE, KNOWN, SOME = "anyone", "known", "some"
"""Needs that no single right meets: anyone is let in; a caller with a valid token; a caller with any right at all."""

ANY_TOPIC = ANY_GROUP = "?"
"""The name in a need that a right for any topic or group meets."""

DEAD_LETTERS = "dead-letter."

Answer = tuple[int, bytes]


class Connection:
    """One connection for the thousands of requests of the matrix."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url).netloc
        self._connection = http.client.HTTPConnection(self._address, timeout=PATIENCE_SECONDS)

    def ask(self, method: str, path: str, body: Any = None, token: str | None = None) -> Answer:
        """Make one request; return status and body. Bytes are sent as a form, anything else as JSON."""
        kind = "application/x-www-form-urlencoded" if isinstance(body, bytes) else "application/json"
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": kind} | ({} if token is None else {"authorization": f"Bearer {token}"})
        try:
            return self._once(method, path, data, headers)
        except (http.client.RemoteDisconnected, ConnectionError):  # the server closed it because it was idle
            self._connection.close()
            return self._once(method, path, data, headers)

    def _once(self, method: str, path: str, data: bytes | None, headers: dict[str, str]) -> Answer:
        self._connection.request(method, path, data, headers)
        answer = self._connection.getresponse()
        return answer.status, answer.read()

    def close(self) -> None:
        self._connection.close()


@dataclass(frozen=True, slots=True)
class Things:
    """The things of one of two parties that share a server."""

    whose: str
    topic: str
    private: str
    """A topic that no group of the other party subscribes to."""
    group: str
    producer: str
    source: str
    secret: str
    """The text of its messages' bodies."""

    @classmethod
    def new(cls, whose: str) -> Things:
        prefix, kinds = f"{whose}{uuid.uuid4().hex[:6]}", ("topic", "private", "group", "producer", "source", "secret")
        return cls(whose, *(f"{prefix}.{kind}" for kind in kinds))

    @property
    def prefix(self) -> str:
        """The prefix of all its names."""
        return self.topic.partition(".")[0]

    @property
    def names(self) -> tuple[str, ...]:
        """The names that a caller without rights to it must not be shown."""
        return (self.topic, self.private, self.group, self.producer, self.source, self.secret)

    def fill(self, text: str, other: Things) -> str:
        """A right or a need with its names filled in; `other_…` are names of the other party."""
        own = {f: getattr(self, f) for f in self.__slots__}
        return text.format(**own, prefix=self.prefix, **{f"other_{f}": getattr(other, f) for f in self.__slots__})


def covers(right: str, need: str) -> bool:
    """Whether a right, such as `publish:order.*`, covers a need, such as `publish:order.placed`."""
    action, name, topic = _parts(right)
    wanted_action, wanted, wanted_topic = _parts(need)
    if action == "publish" and wanted.startswith(DEAD_LETTERS) and not name.startswith(DEAD_LETTERS):
        return False
    has_topic = wanted_topic == ANY_TOPIC or fnmatchcase(wanted_topic, topic)
    has_name = wanted == ANY_GROUP or fnmatchcase(wanted, name)
    return action == wanted_action and has_name and has_topic


def _parts(text: str) -> tuple[str, str, str]:
    action, _, rest = text.partition(":")
    name, _, topic = rest.partition("@")
    return action, name or "*", topic or "*"


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller. `rights` None: without a token, or with a token that is not valid."""

    name: str
    token: str | None
    rights: tuple[str, ...] | None

    def meets(self, needs: Needs, things: Things, other: Things) -> bool:
        """Whether the caller has all rights of one of the alternatives."""
        if needs == ANYONE:
            return True
        if self.rights is None:
            return False
        if isinstance(needs, str):
            return needs == KNOWN or bool(self.rights)
        return any(
            all(any(covers(right, things.fill(need, other)) for right in self.rights) for need in alternative)
            for alternative in needs
        )

    def may_see(self, things: Things) -> bool:
        """Whether any of the caller's rights covers a name of these things."""
        for right in self.rights or ():
            action, name, topic = _parts(right)
            named = any(fnmatchcase(known, name.removeprefix(DEAD_LETTERS)) for known in things.names)
            if action == "view" or named or (action == "consume" and fnmatchcase(things.topic, topic)):
                return True
        return False


Needs = str | tuple[tuple[str, ...], ...]
"""ANYONE, KNOWN, SOME, or alternatives, each a set of rights."""


def needs(*alternatives: str) -> Needs:
    """Alternatives; blanks separate the rights of one."""
    return tuple(tuple(alternative.split()) for alternative in alternatives)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    method: str
    path: str
    body: Any = None


@dataclass(frozen=True, slots=True)
class Part:
    """One item of a request: its need, and its status if that is met. `is_foreign`: answered as another party's."""

    needs: Needs
    status: int
    is_foreign: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """A use of a route: its need, its request for a party's things, and the expected answer."""

    route: str
    """Method and path as in the router."""
    needs: Needs
    ask: Callable[[Things, Things], Asked]
    """Makes the request from the party's things and the other's; called for each request that is let in."""
    status: int = 200
    parts: Sequence[Part] = ()
    """The items of the answer, in order."""
    spoils: bool = False
    """It deletes things that other cases need; they are restored afterwards."""
    what: str = ""
    refers_to: Sequence[str] = ()
    """Names that an answer may contain although the request does not."""
    shows: Sequence[tuple[Needs, str]] = ()
    """Texts that an answer must contain for callers with such rights, and for no others."""
    is_of_things: bool = True
    """It names a party's things, and is asked for both parties."""

    def expected(self, caller: Caller, things: Things, other: Things) -> list[int]:
        """The expected status of the answer and of its items."""
        if self.needs != ANYONE and caller.rights is None:
            return [401]
        if not caller.meets(self.needs, things, other):
            return [403]
        return [self.status, *(p.status if caller.meets(p.needs, things, other) else 403 for p in self.parts)]


class Room:
    """A server with access on, the things of two parties on it, and all callers."""

    def __init__(self, server: GuardedInMemory) -> None:
        self.server = server
        self._connection = Connection(server.url)
        self.own, self.foreign = Things.new("own"), Things.new("foreign")
        every = ["admin", "view", "publish", "publish:dead-letter.*", "check", "consume", "read", "bridge"]
        self.all = server.make(*every, name="everything")

    def close(self) -> None:
        self._connection.close()

    def ask(self, asked: Asked, token: str | None) -> Answer:
        return self._connection.ask(asked.method, asked.path, asked.body, token)

    def do(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Make a request with all rights; it must succeed. An admin write gets a reason."""
        if body is not None and path.startswith("/v1/admin/") and "whole_from" not in body:
            body = {"reason": REASON} | body
        status, raw = self._connection.ask(method, path, body, self.all)
        assert status == 200, f"{method} {path} was answered with {status}: {raw.decode()}"
        return json.loads(raw)

    def other(self, things: Things) -> Things:
        return self.foreign if things is self.own else self.own

    def restore(self) -> None:
        """Make missing topics and subscriptions: each group subscribes to its own topic and the other party's."""
        for things in (self.own, self.foreign):
            for topic in (things.topic, things.private):
                self.do("PUT", f"/v1/admin/topics/{topic}", {})
        for things in (self.own, self.foreign):
            for topic in (things.topic, self.other(things).topic):
                body = {"start": "latest"}
                self.do("PUT", f"/v1/admin/groups/{things.group}/subscriptions/{topic}", body)
            self.do("POST", f"/v1/admin/groups/{things.group}/resume", {})

    def publish(self, *messages: tuple[str, str]) -> list[str]:
        """Publish texts to topics; return the message ids."""
        body = {"messages": [{"topic": topic, "body": text, "key": text} for topic, text in messages]}
        return [str(item["id"]) for item in self.do("POST", "/v1/messages", body)["items"]]

    def half(self, things: Things, transaction: str) -> str:
        """Store a half of the producer group; return its id."""
        message = {"topic": things.topic, "body": things.secret, "key": things.secret}
        body = {"producer_group": things.producer, "source": things.source, "instance": "i",
                "transactions": [{"id": transaction, "messages": [message]}]}  # fmt: skip
        (item,) = self.do("POST", "/v1/transactions", body)["items"]
        assert item["status"] in (200, 201), item
        return transaction

    def receipt(self, things: Things, sent_to: Things) -> str:
        """A receipt of the group of `things` for a message of the topic of `sent_to`."""
        self.publish((sent_to.topic, sent_to.secret))
        body = {"instance": "i", "topics": [sent_to.topic], "max": 1, "lease": 3600}
        (message,) = self.do("POST", f"/v1/groups/{things.group}/receive", body)["messages"]
        return str(message["receipt"])
