"""Django in the crash explorer: statements and COMMITs of its connections are steps, and each process of the service
has connections, producers and the setting NOTIFY of its own, although the project is loaded only once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import sqlalchemy as sa
from django.apps import apps
from django.conf import settings
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper

from notify.client.django import configured
from notify.client.django.engine import DjangoEngine, django_engine_of
from notify.errors import InvalidRequest
from notify.testing.crashes import Crashed
from notify.testing.step import (
    AFTER_COMMIT,
    AT_COMMIT,
    LOST_COMMIT,
    REFUSED_COMMIT,
    commit_error,
    executing,
    meet,
)


def engine_of_alias(alias: str) -> sa.Engine:
    """A new engine of one of Django's databases. Raises InvalidRequest for one in memory."""
    wrapper: Any = connections[alias]
    if wrapper.vendor == "sqlite" and wrapper.is_in_memory_db():
        raise InvalidRequest(
            f"Django's database {alias!r} is in memory, where the processes of a service cannot meet: name a file in "
            'DATABASES, for tests as "TEST": {"NAME": …}'
        )
    return DjangoEngine(alias).engine


class DjangoProcesses:
    """Gives each process of the service what a new process of Django has, and the test what it had before."""

    def __init__(self) -> None:
        self._producers = dict(configured._producers)
        self._notify = getattr(settings, "NOTIFY", None)
        self._inherited: list[Any] = []
        """Connections of the process before a fork, which are neither used nor closed here."""

    def begin(self, url: str) -> None:
        """A process begins, in this thread, whose server has this address."""
        for wrapper in connections.all(initialized_only=True):
            self._inherited.append(wrapper)
            del connections[wrapper.alias]
        self._forget()
        if isinstance(self._notify, dict):
            settings.NOTIFY = self._notify | {"URL": url}

    def end(self) -> None:
        self._forget()
        configured._producers.update(self._producers)
        if isinstance(self._notify, dict):
            settings.NOTIFY = self._notify

    def _forget(self) -> None:
        """Forget the engines and producers of the process before, which the explorer ends."""
        django_engine_of.cache_clear()
        configured._producers.clear()

    def kept_modules(self) -> set[str]:
        """The modules of models and applications, with the packages that they are in."""
        if not apps.ready:
            return set()
        names = {model.__module__ for model in apps.get_models(include_auto_created=True)}
        names |= {type(config).__module__ for config in apps.get_app_configs()}
        return {name.rsplit(".", number)[0] for name in names for number in range(name.count(".") + 1)}


@contextlib.contextmanager
def _rolled_back(wrapper: Any) -> Iterator[None]:
    """If the process dies in this context, the connection is rolled back at once: the threads of the killed process
    live on, and a transaction of SQLite would keep the next process out."""
    try:
        yield
    except Crashed:
        with contextlib.suppress(Exception):
            wrapper.connection.rollback()
        raise


def _execute(hooks: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def execute(self: Any, sql: Any, *given: Any, **named: Any) -> Any:
        run = hooks.owner_of(self.db)
        if run is not None:
            with _rolled_back(self.db):
                hooks.note(run, self.db.connection)
                executing(run, str(sql))
        return original(self, sql, *given, **named)

    return execute


def _commit(hooks: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def commit(self: Any) -> None:
        run = None if self.connection is None else hooks.owner_of(self)
        if run is None:
            original(self)
            return
        with _rolled_back(self):
            is_refused = meet(run, AT_COMMIT)
        if is_refused:
            self.connection.rollback()
            _fail(self, REFUSED_COMMIT)
        original(self)
        if meet(run, AFTER_COMMIT):
            _fail(self, LOST_COMMIT)

    return commit


def _connect(hooks: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def connect(self: Any) -> None:
        run = hooks.owner_of(self)
        if run is not None:
            run.check_alive()
        original(self)
        if run is not None:
            hooks.note(run, self.connection)

    return connect


def _set_autocommit(hooks: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """Django ends each `atomic` block with it, also one that dies; sqlite3 commits what was not rolled back then."""

    def set_autocommit(self: Any, *given: Any, **named: Any) -> None:
        run = None if self.connection is None else hooks.owner_of(self)
        if run is not None:
            with _rolled_back(self):
                run.check_alive()
        original(self, *given, **named)

    return set_autocommit


def _fail(wrapper: Any, text: str) -> NoReturn:
    """Raise an error as Django raises its driver's for a connection that fails at the COMMIT."""
    with wrapper.wrap_database_errors:
        raise commit_error(wrapper.Database, wrapper.vendor, text)
    raise AssertionError("Django has raised no error")


WRAPPED = (
    (CursorWrapper, "_execute_with_wrappers", _execute),
    (BaseDatabaseWrapper, "_commit", _commit),
    (BaseDatabaseWrapper, "connect", _connect),
    (BaseDatabaseWrapper, "set_autocommit", _set_autocommit),
)
