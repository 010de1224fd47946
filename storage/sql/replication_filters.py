"""Changes that a replica of MySQL or MariaDB leaves out, by its filters, or because they fail there."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy.engine import Connection


def skipped_errors(connection: Connection) -> str:
    """The setting by which the replica skips changes that fail; "" if it stops at them."""
    query = "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('slave_skip_errors', 'replica_skip_errors')"
    skipped = [(str(row[0]), str(row[1])) for row in connection.exec_driver_sql(query)]
    return next((f"{name} {value}" for name, value in skipped if value.upper() not in ("", "OFF")), "")


# The rules of filters are those of the servers for binlogs with rows. If statements are in the binlog, the rules of
# databases look at the session's default database instead.
_DO_DATABASE, _IGNORE_DATABASE = "Replicate_Do_DB", "Replicate_Ignore_DB"
_DO_TABLE, _IGNORE_TABLE = "Replicate_Do_Table", "Replicate_Ignore_Table"
_DO_WILD, _IGNORE_WILD = "Replicate_Wild_Do_Table", "Replicate_Wild_Ignore_Table"
_OF_TRANSACTIONS = ("Replicate_Do_Domain_Ids", "Replicate_Ignore_Domain_Ids", "Replicate_Ignore_Server_Ids")
"""Filters of whole transactions, by where they come from; nothing says which tables that concerns."""


def left_out(channels: Sequence[Mapping[str, Any]], schema: str, tables: Collection[str]) -> str:
    """Why a replica may lack rows of one of these tables, in words; "" if no filter leaves any out.

    `channels`: what the server shows of each connection to a primary. A replica with several primaries may filter a
    table at all of them but the one that has it.
    """
    for table in sorted(tables):
        whys = [_why(channel, schema.lower(), table.lower()) for channel in channels]
        is_taken = any(not why and _takes_by_name(channel) for why, channel in zip(whys, channels, strict=True))
        if not is_taken and (why := next(filter(None, whys), "")):
            return f"its replication leaves out changes of {schema}.{table} ({why})"
    for channel in channels:
        for name in _OF_TRANSACTIONS:
            if listed := _listed(channel, name):
                return f"its replication leaves out transactions ({name} {', '.join(listed)})"
    return ""


def _why(channel: Mapping[str, Any], schema: str, table: str) -> str:
    """The filter of a channel that leaves a table out; "" if there is none."""
    databases = _listed(channel, _DO_DATABASE)
    if databases and schema not in databases:
        return f"{_DO_DATABASE} {', '.join(databases)}"
    if not databases and schema in _listed(channel, _IGNORE_DATABASE):
        return f"{_IGNORE_DATABASE} {schema}"
    name = f"{schema}.{table}"
    if name in (tables := _listed(channel, _DO_TABLE)):
        return ""
    if name in _listed(channel, _IGNORE_TABLE):
        return f"{_IGNORE_TABLE} {name}"
    if _matching(patterns := _listed(channel, _DO_WILD), name):
        return ""
    if ignoring := _matching(_listed(channel, _IGNORE_WILD), name):
        return f"{_IGNORE_WILD} {ignoring}"
    if tables:
        return f"{_DO_TABLE} {', '.join(tables)}"
    return f"{_DO_WILD} {', '.join(patterns)}" if patterns else ""


def _takes_by_name(channel: Mapping[str, Any]) -> bool:
    """Whether a channel has a list of what it takes."""
    return any(_listed(channel, name) for name in (_DO_DATABASE, _DO_TABLE, _DO_WILD))


def _listed(channel: Mapping[str, Any], name: str) -> list[str]:
    return [part.strip().lower() for part in str(channel.get(name) or "").split(",") if part.strip()]


def _matching(patterns: Sequence[str], name: str) -> str:
    """The first pattern that matches a name: % stands for any text, _ for a character, and \\ quotes them."""
    for pattern in patterns:
        parts = re.findall(r"\\.|.", pattern)
        wild = "".join({"%": ".*", "_": "."}.get(part, re.escape(part[-1])) for part in parts)
        if re.fullmatch(wild, name):
            return pattern
    return ""
