"""Tables of Notify's as others have changed them, who did not know what rests on them."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from notify.client.tables.definitions import metadata
from notify.storage.sql import tables as server

MYSQLS = ("mysql", "mariadb")


def of(name: str) -> sa.Table:
    """The table of this name."""
    return metadata.tables[name] if name in metadata.tables else server.metadata.tables[name]


def key_of(name: str, *more: str) -> str:
    """The columns of a table's key and further ones, in brackets."""
    return f"({', '.join([*(column.name for column in of(name).primary_key.columns), *more])})"


def partitioned(
    kind: str, name: str, how: str = "RANGE (created_at)", key: Sequence[str] = ("created_at",)
) -> list[str]:
    """Statements that make an empty table again with partitions, so that its key has their column too."""
    if kind == "postgresql":
        part = "FOR VALUES WITH (MODULUS 1, REMAINDER 0)" if how.startswith("HASH") else "DEFAULT"
        return [
            f"CREATE TABLE {name}_2 (LIKE {name} INCLUDING DEFAULTS) PARTITION BY {how}",
            f"DROP TABLE {name}",
            f"ALTER TABLE {name}_2 RENAME TO {name}",
            f"ALTER TABLE {name} ADD PRIMARY KEY {key_of(name, *key)}",
            f"CREATE TABLE {name}_all PARTITION OF {name} {part}",
        ]
    if kind in MYSQLS:
        how = how.replace("RANGE (", "RANGE COLUMNS (").replace("HASH (", "KEY (")
        parts = "PARTITIONS 4" if how.startswith("KEY") else "(PARTITION p0 VALUES LESS THAN (MAXVALUE))"
        return [*_with_key(name, key_of(name, *key)), f"ALTER TABLE {name} PARTITION BY {how} {parts}"]
    return made_again(name, key_of(name, *key))  # SQLite has no partitions, but keys can be wrong there, too


def _with_key(name: str, key: str) -> list[str]:
    return [f"ALTER TABLE {name} DROP PRIMARY KEY, ADD PRIMARY KEY {key}"]


def without_key(kind: str, name: str) -> list[str]:
    if kind == "postgresql":
        return [f"ALTER TABLE {name} DROP CONSTRAINT {name}_pkey"]
    return [f"ALTER TABLE {name} DROP PRIMARY KEY"] if kind in MYSQLS else made_again(name, "")


def made_again(name: str, key: str, of_column: str = "", behind: str = "") -> list[str]:
    """Statements for SQLite that make a table again with another key; `of_column`: what each column ends with."""
    columns = [
        f"{column.name} {column.type} {of_column if column.primary_key else ''} {'' if column.nullable else 'NOT NULL'}"
        + (f" DEFAULT {column.server_default.arg}" if isinstance(column.server_default, sa.DefaultClause) else "")
        for column in of(name).columns
    ]
    keys = [f"PRIMARY KEY {key} {behind}"] if key else []
    return [f"DROP TABLE {name}", f"CREATE TABLE {name} ({', '.join([*columns, *keys])})"]


def a_view(name: str) -> list[str]:
    return [f"ALTER TABLE {name} RENAME TO {name}_base", f"CREATE VIEW {name} AS SELECT * FROM {name}_base"]


def spoil(engine: Engine, statements: Sequence[str]) -> None:
    """Run statements as somebody else, whose session ends."""
    other = sa.create_engine(engine.url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with other.connect() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
