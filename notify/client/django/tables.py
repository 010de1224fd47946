"""Notify's tables in one of Django's databases: what the migration makes, and what is missing."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from django.db import DEFAULT_DB_ALIAS, connections, transaction

from notify.client import making_tables, table
from notify.client.django.lender import django_errors, lender_of


def create_tables(using: str = DEFAULT_DB_ALIAS) -> str:
    """Make the tables where they are missing, and give the database its source id. Returns the source id.

    The migration of this application calls it. Call it yourself where no migrations run. Raises BindingRefused for a
    database that cannot carry messages.
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
    """A transaction, without a savepoint in one that is there: MySQL and MariaDB commit with each change of a table,
    and know no savepoint after it."""
    return transaction.atomic(using=using, savepoint=False)


def missing_tables(using: str) -> list[str]:
    """Names of Notify's tables that the database lacks, in the order of the alphabet."""
    wrapper = connections[using]
    with wrapper.temporary_connection(), django_errors(wrapper):
        existing = sa.inspect(lender_of(using).borrow(wrapper)).get_table_names()
    return sorted(table.metadata.tables.keys() - set(existing))
