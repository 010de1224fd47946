"""Statements on a database server, outside any transaction."""

from __future__ import annotations

import sqlalchemy as sa


def execute(url: str, *statements: str) -> list[tuple[object, ...]]:
    """Run statements on one connection, each committed by itself; return the rows of the last one."""
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    rows: list[tuple[object, ...]] = []
    try:
        with engine.connect() as connection:
            for statement in statements:
                result = connection.exec_driver_sql(statement)
                rows = [tuple(row) for row in result] if result.returns_rows else []
    finally:
        engine.dispose()
    return rows
