"""Notify's tables in one of Django's databases: creates and drops them, and lists the missing ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, connections, transaction

from notify.client.django.engine import django_engine_of, django_errors
from notify.client.tables import creation, definitions

MAKE_TABLES = "run `manage.py migrate` with notify.client.django in INSTALLED_APPS"


def create_tables(using: str = DEFAULT_DB_ALIAS, schema: str | None = None) -> str:
    """Create the tables that are missing, and give their schema a source id. Returns the source id.

    `schema`: None: that of the setting NOTIFY, or where Django creates its tables, for a project with a schema for each
    tenant too. The migration of this application calls it. Call it yourself if the project runs no migrations. Raises
    BindingRefused for a database that cannot carry messages.
    """
    with _borrowed(using) as connection:
        return creation.create_tables(connection, schema or _schema(connection))


def drop_tables(using: str = DEFAULT_DB_ALIAS, schema: str | None = None) -> None:
    """Undo `create_tables`. Undecided halves of this schema can then only be resolved by an operator."""
    with _borrowed(using) as connection:
        creation.drop_tables(connection, schema or _schema(connection))


def _schema(connection: sa.Connection) -> str | None:
    """Where Django itself would create and find its tables. On PostgreSQL it is the first schema of the search_path;
    a table of the same name in a later one belongs to all tenants, not to this one."""
    named = (getattr(settings, "NOTIFY", None) or {}).get("SCHEMA")
    if named or connection.dialect.name != "postgresql":
        return named
    return connection.execute(sa.text("SELECT current_schema()")).scalar()


@contextlib.contextmanager
def _borrowed(using: str) -> Iterator[sa.Connection]:
    with _in_transaction(using):
        wrapper = connections[using]
        with django_errors(wrapper):
            yield django_engine_of(using).borrow_in_place(wrapper)


def _in_transaction(using: str) -> Any:
    """A transaction; within an open transaction, no savepoint: MySQL and MariaDB commit with each DDL statement, which
    ends all savepoints."""
    return transaction.atomic(using=using, savepoint=False)


def missing_tables(using: str) -> list[str]:
    """The names of Notify's tables that the database lacks, sorted."""
    wrapper = connections[using]
    with wrapper.temporary_connection(), django_errors(wrapper):
        connection = django_engine_of(using).borrow_in_place(wrapper)
        existing = sa.inspect(connection).get_table_names(schema=_schema(connection))
    return sorted(definitions.metadata.tables.keys() - set(existing))
