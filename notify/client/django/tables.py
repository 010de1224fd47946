"""Notify's tables in one of Django's databases: creates and drops them, and lists the missing ones."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from django.db import DEFAULT_DB_ALIAS, connections, transaction

from notify.client import making_tables, table
from notify.client.django.lender import django_errors, lender_of


def create_tables(using: str = DEFAULT_DB_ALIAS) -> str:
    """Create the tables that are missing, and give the database a source id. Returns the source id.

    The migration of this application calls it. Call it yourself if the project runs no migrations. Raises
    BindingRefused for a database that cannot carry messages.
    """
    with _in_transaction(using):
        wrapper = connections[using]
        with django_errors(wrapper):
            return making_tables.create_tables(lender_of(using).borrow(wrapper))


def drop_tables(using: str = DEFAULT_DB_ALIAS) -> None:
    """Undo `create_tables`. Undecided halves of this database can then only be resolved by an operator."""
    with _in_transaction(using):
        wrapper = connections[using]
        with django_errors(wrapper):
            making_tables.drop_tables(lender_of(using).borrow(wrapper))


def _in_transaction(using: str) -> Any:
    """A transaction; within an open transaction, no savepoint: MySQL and MariaDB commit with each DDL statement, which
    ends all savepoints."""
    return transaction.atomic(using=using, savepoint=False)


def missing_tables(using: str) -> list[str]:
    """The names of Notify's tables that the database lacks, sorted."""
    wrapper = connections[using]
    with wrapper.temporary_connection(), django_errors(wrapper):
        existing = sa.inspect(lender_of(using).borrow(wrapper)).get_table_names()
    return sorted(table.metadata.tables.keys() - set(existing))
