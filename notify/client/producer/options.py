"""ProducerOptions: the arguments that every producer takes, written once; and ProducerPlan, which checks them."""

from __future__ import annotations

import inspect
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict, TypeVar, get_type_hints

from sqlalchemy.pool import SingletonThreadPool, StaticPool

from notify.check.listener import CheckMessageListener
from notify.check.sources import Sources
from notify.client.bodies.sending import STORE_ABOVE, STORE_SECONDS, LargeBodies, large_bodies
from notify.client.inbox.inbox import PURGE_AFTER_SECONDS
from notify.client.producer.left_behind import LeftBehind
from notify.client.producer.transactions import HALF_SECONDS
from notify.client.tables.half_rows import MODES, Mode
from notify.client.tables.purge import check_purge_after
from notify.client.threads.loop import instance_name
from notify.client.transport.login import Shown
from notify.client.transport.servers import Chooser, room_then_load
from notify.errors import InvalidRequest
from notify.protocol.limits import LIMITS, check_between, check_name
from notify.protocol.message import number_of_seconds

F = TypeVar("F", bound=Callable[..., None])

HALF_MIN_SECONDS, HALF_MAX_SECONDS = 0.01, 3600.0
"""Bounds of `half_timeout`."""
FLUSH_SECONDS, FLUSH_MAX_SECONDS = 10.0, 3600.0
"""The default and the upper bound of the timeout of `flush`."""


class ProducerOptions(TypedDict, total=False):
    """The arguments of every producer except its server, its group and its database: see TransactionProducer. Their
    defaults are those of ProducerPlan."""

    schema: str | None
    mode: Mode
    rows: bool
    keep_messages: bool
    batching: bool
    answer_checks: bool
    half_timeout: float
    check_after: float | None
    purge_after: float | None
    token: Shown
    tls: ssl.SSLContext | None
    chooser: Chooser
    wait_for_outcome: bool
    store: str | None
    store_above: int
    store_timeout: float
    compress_above: int | None


@dataclass(slots=True, kw_only=True)
class ProducerPlan:
    """All arguments of a producer, checked. Raises InvalidRequest for invalid ones, TypeError for unknown ones."""

    url: str
    group: str
    engine: Any
    """The user's engine: an Engine, an AsyncEngine or None."""
    schema: str | None = None
    mode: Mode = "half"
    rows: bool = True
    keep_messages: bool = False
    batching: bool = True
    answer_checks: bool = True
    half_timeout: float = HALF_SECONDS
    check_after: float | None = None
    purge_after: float | None = PURGE_AFTER_SECONDS
    token: Shown = None
    tls: ssl.SSLContext | None = None
    chooser: Chooser = room_then_load
    wait_for_outcome: bool = False
    store: str | None = None
    store_above: int = STORE_ABOVE
    store_timeout: float = STORE_SECONDS
    compress_above: int | None = None
    sources: Sources = field(init=False)
    """The schemas that the producer sends from and answers for."""
    instance: str = field(init=False, default_factory=instance_name)
    """The name of this process among the instances of its group."""
    listeners: list[CheckMessageListener] = field(init=False, default_factory=list)
    left_behind: LeftBehind | None = field(init=False, default=None)
    """The keys and schemas that this process has left behind; None in other modes than `auto`."""
    bodies: LargeBodies | None = field(init=False)
    """Stores or compresses large bodies; None if the producer does neither."""

    def __post_init__(self) -> None:
        self.sources = Sources(self.schema)
        check_name("producer_group", self.group)
        if self.check_after is not None:
            check_check_after(self.check_after)
        if self.purge_after is not None:
            self.purge_after = number_of_seconds("purge_after", self.purge_after)
        check_purge_after(self.purge_after)
        self.half_timeout = number_of_seconds("half_timeout", self.half_timeout)
        check_between("half_timeout", self.half_timeout, HALF_MIN_SECONDS, HALF_MAX_SECONDS)
        if self.mode not in MODES:
            raise InvalidRequest(f"mode {self.mode!r} is none of {', '.join(MODES)}")
        if self.mode != "half" and self.engine is None:
            raise InvalidRequest(f"mode {self.mode} needs the engine: messages wait in its half_message table")
        if not self.rows and (self.mode != "outbox" or self.engine.dialect.name != "postgresql"):
            raise InvalidRequest("rows=False is for mode outbox on PostgreSQL, whose log a bridge reads")
        if self.mode == "outbox" and self.wait_for_outcome:
            raise InvalidRequest("wait_for_outcome is not for mode outbox: its commits have no outcome")
        if self.engine is not None:
            pool = getattr(getattr(self.engine, "sync_engine", self.engine), "pool", None)
            _check_reset(pool)
            if self.answer_checks or self.mode == "auto":
                _check_pool(pool)
        if self.mode == "auto":
            self.left_behind = LeftBehind()
        self.bodies = large_bodies(
            self.group, self.mode, self.rows, self.store, self.store_above, self.store_timeout, self.compress_above
        )

    def add_listener(self, listener: CheckMessageListener) -> None:
        """Let a listener answer the checks of its topics. Raises InvalidRequest for an invalid listener."""
        name = type(listener).__name__
        if isinstance(listener, type) or not hasattr(listener, "topics") or not hasattr(listener, "check"):
            description = f"the class {listener.__name__}" if isinstance(listener, type) else f"a {name}"
            raise InvalidRequest(
                f"this is {description}: give an object of a class that is derived from CheckMessageListener"
            )
        if not listener.topics:
            raise InvalidRequest(f"{name} names no topics")
        if isinstance(listener.topics, str):
            raise InvalidRequest(f"{name}.topics is text; it should be a list of topics, such as [{listener.topics!r}]")
        if inspect.iscoroutinefunction(listener.check):
            raise InvalidRequest(f"{name}.check is a coroutine function; it is called in a thread: write `def check`")
        self.listeners.append(listener)


def _check_reset(pool: object) -> None:
    """Raises InvalidRequest for a pool that commits what a session leaves that was never closed: its changes without
    its messages."""
    if getattr(getattr(pool, "_reset_on_return", None), "name", "") == "reset_commit":
        raise InvalidRequest(
            "the engine has pool_reset_on_return='commit', which commits the changes of a session that nobody closed, "
            "and not its messages: leave the option out, so that such changes are rolled back",
            "invalid_engine",
        )


def _check_pool(pool: object) -> None:
    """Raises InvalidRequest for an engine whose pool has no connections for the producer: it would begin and roll back
    within the service's transactions, or look into an empty database."""
    if not isinstance(pool, StaticPool | SingletonThreadPool):
        return
    why = (
        "gives all threads the same connection, within whose transaction the producer would answer checks"
        if isinstance(pool, StaticPool)
        else "gives each thread a database of its own, in which the producer finds nothing"
    )
    raise InvalidRequest(
        f"the engine ({type(pool).__name__}, as for a database in memory) {why}: use a file, or give "
        "answer_checks=False where a test needs no checks (not in mode auto)",
        "invalid_engine",
    )


def check_check_after(seconds: float) -> None:
    """Raises InvalidRequest for a `check_after` that the server would refuse."""
    low, high = LIMITS.check_after_min_seconds, LIMITS.check_after_max_seconds
    check_between("check_after", number_of_seconds("check_after", seconds), low, high)


def check_flush(timeout: float) -> float:
    """The timeout of `flush`, in seconds. Raises InvalidRequest."""
    timeout = number_of_seconds("timeout", timeout)
    check_between("timeout", timeout, 0, FLUSH_MAX_SECONDS)
    return timeout


def takes_options(init: F) -> F:
    """Give the `__init__` of a producer, which takes `**options: Unpack[ProducerOptions]`, a signature that names each
    option with its type and default, for `help()` and for editors that ask at run time."""
    own = inspect.signature(init, eval_str=True)
    defaults = {option.name: option.default for option in fields(ProducerPlan)}
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=kind)
        for name, kind in get_type_hints(ProducerOptions).items()
    ]
    named = [given for given in own.parameters.values() if given.kind is not inspect.Parameter.VAR_KEYWORD]
    shown: Any = init
    shown.__signature__ = own.replace(parameters=[*named, *options])
    shown.__annotations__ = {given.name: given.annotation for given in (*named, *options) if given.name != "self"}
    return init
