"""Every type of event that MySQL 9.7 and MariaDB 12.3 may write to a binlog, and how a bridge treats it.

An event of an unlisted type stops the bridge, unless the source marks the event as ignorable. Types:
https://dev.mysql.com/doc/dev/mysql-server/latest/namespacemysql_1_1binlog_1_1event.html and
https://mariadb.com/kb/en/2-binlog-event-header/
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

QUERY, ROTATE, FORMAT, XID, EXECUTE_LOAD, TABLE_MAP = 2, 4, 15, 16, 18, 19
WRITE_V1, UPDATE_V1, WRITE, UPDATE, PARTIAL_UPDATE = 23, 24, 30, 31, 39
PAYLOAD, QUERY_COMPRESSED, FRAGMENT = 40, 165, 172
HEARTBEAT, HEARTBEAT_V2, XA_PREPARE = 27, 41, 38
MYSQL_GTID, TAGGED_GTID, MARIADB_GTID = 33, 42, 162
GTIDS = frozenset((MYSQL_GTID, TAGGED_GTID, MARIADB_GTID))
PREVIOUS_GTIDS, GTID_LIST = 35, 163
CHECKPOINT, START_ENCRYPTION = 161, 164

COMPRESSED_ROWS = frozenset((166, 167, 169, 170))
"""Types of MariaDB's row events whose rows are compressed: 166 and 167 like 23 and 24, 169 and 170 like 30 and 31."""
UPDATES = frozenset((UPDATE_V1, UPDATE, PARTIAL_UPDATE, 167, 170))
"""Types of events that have each row before and after its change."""
WITH_EXTRA = frozenset((WRITE, UPDATE, PARTIAL_UPDATE, 169, 170))
"""Types of events whose header contains extra data that begins with its own length."""
ROWS = frozenset((WRITE_V1, UPDATE_V1, WRITE, UPDATE, PARTIAL_UPDATE)) | COMPRESSED_ROWS
MAY_BE_IGNORED = 0x80
"""The flag of an event that a reader may skip even if it does not know the type."""


class Treatment(enum.Enum):
    """How a bridge treats an event."""

    HANDLED = "handled"
    REFUSED = "refused"
    HARMLESS = "harmless"


@dataclass(slots=True, frozen=True)
class EventType:
    """A type of event. `why`: the remedy if the event is refused; otherwise why no message is left out."""

    name: str
    treatment: Treatment
    why: str


def _handled(name: str, why: str) -> EventType:
    return EventType(name, Treatment.HANDLED, why)


def _refused(name: str, why: str) -> EventType:
    return EventType(name, Treatment.REFUSED, why)


def _harmless(name: str, why: str) -> EventType:
    return EventType(name, Treatment.HARMLESS, why)


_STATEMENT = "it belongs to a statement, and the statement's own event is looked at"
_OLD = "the source writes events of a version before 5.1: upgrade it"
_DELETED = "a deleted row was a message when it was inserted"
_GROUP_REPLICATION = "group replication's own: it has no rows"
EVENT_TYPES = {
    0: _refused("UNKNOWN_EVENT", "the source writes an event without a type: its binlog is damaged"),
    1: _refused("START_EVENT_V3", _OLD),
    QUERY: _handled("QUERY_EVENT", "it begins or ends a transaction, sets a savepoint, or is a statement to look at"),
    3: _harmless("STOP_EVENT", "the server was shut down: the next file follows"),
    ROTATE: _handled("ROTATE_EVENT", "the next file is named, and table numbers are no longer valid"),
    5: _harmless("INTVAR_EVENT", _STATEMENT),
    6: _refused("LOAD_EVENT", _OLD),
    7: _harmless("SLAVE_EVENT", "no server ever wrote it"),
    8: _refused("CREATE_FILE_EVENT", _OLD),
    9: _harmless("APPEND_BLOCK_EVENT", _STATEMENT),
    10: _refused("EXEC_LOAD_EVENT", _OLD),
    11: _harmless("DELETE_FILE_EVENT", _STATEMENT),
    12: _refused("NEW_LOAD_EVENT", _OLD),
    13: _harmless("RAND_EVENT", _STATEMENT),
    14: _harmless("USER_VAR_EVENT", _STATEMENT),
    FORMAT: _handled("FORMAT_DESCRIPTION_EVENT", "a file begins: it says whether events have checksums"),
    XID: _handled("XID_EVENT", "a transaction is committed"),
    17: _harmless("BEGIN_LOAD_QUERY_EVENT", _STATEMENT),
    EXECUTE_LOAD: _handled("EXECUTE_LOAD_QUERY_EVENT", "LOAD DATA as a statement: looked at like any statement"),
    TABLE_MAP: _handled("TABLE_MAP_EVENT", "it says which table a number means, and what its columns are"),
    20: _refused("PRE_GA_WRITE_ROWS_EVENT", _OLD),
    21: _refused("PRE_GA_UPDATE_ROWS_EVENT", _OLD),
    22: _refused("PRE_GA_DELETE_ROWS_EVENT", _OLD),
    WRITE_V1: _handled("WRITE_ROWS_EVENT_V1", "inserted rows"),
    UPDATE_V1: _handled("UPDATE_ROWS_EVENT_V1", "rows before and after"),
    25: _harmless("DELETE_ROWS_EVENT_V1", _DELETED),
    26: _refused(
        "INCIDENT_EVENT",
        "the source says that events are missing from its binlog (an incident): start this bridge with --backfill",
    ),
    HEARTBEAT: _handled("HEARTBEAT_LOG_EVENT", "the source waits for something to happen"),
    28: _harmless("IGNORABLE_LOG_EVENT", "the source says so"),
    29: _harmless("ROWS_QUERY_LOG_EVENT", "the statement that rows came from; the rows follow"),
    WRITE: _handled("WRITE_ROWS_EVENT", "inserted rows"),
    UPDATE: _handled("UPDATE_ROWS_EVENT", "rows before and after"),
    32: _harmless("DELETE_ROWS_EVENT", _DELETED),
    MYSQL_GTID: _handled("GTID_LOG_EVENT", "a transaction begins"),
    34: _refused(
        "ANONYMOUS_GTID_LOG_EVENT",
        "the source writes transactions without GTIDs: set gtid_mode = ON, then start this bridge with --backfill",
    ),
    PREVIOUS_GTIDS: _handled("PREVIOUS_GTIDS_LOG_EVENT", "it says whether a file continues from the bridge's position"),
    36: _harmless("TRANSACTION_CONTEXT_EVENT", _GROUP_REPLICATION),
    37: _harmless("VIEW_CHANGE_EVENT", _GROUP_REPLICATION),
    XA_PREPARE: _handled("XA_PREPARE_LOG_EVENT", "an XA transaction is prepared, or committed in one phase"),
    PARTIAL_UPDATE: _handled("PARTIAL_UPDATE_ROWS_EVENT", "rows before, and what changed in their JSON values"),
    PAYLOAD: _handled("TRANSACTION_PAYLOAD_EVENT", "a compressed transaction: its events are read"),
    HEARTBEAT_V2: _handled("HEARTBEAT_LOG_EVENT_V2", "the source waits for something to happen"),
    TAGGED_GTID: _handled("GTID_TAGGED_LOG_EVENT", "a transaction begins"),
    160: _harmless("ANNOTATE_ROWS_EVENT", "the statement that rows came from; the rows follow"),
    CHECKPOINT: _harmless("BINLOG_CHECKPOINT_EVENT", "for the server's own recovery"),
    MARIADB_GTID: _handled("GTID_EVENT", "a transaction begins"),
    GTID_LIST: _handled("GTID_LIST_EVENT", "it says whether a file continues from the bridge's position"),
    START_ENCRYPTION: _harmless("START_ENCRYPTION_EVENT", "the server decrypts what it sends"),
    QUERY_COMPRESSED: _handled("QUERY_COMPRESSED_EVENT", "a statement like any other"),
    166: _handled("WRITE_ROWS_COMPRESSED_EVENT_V1", "inserted rows"),
    167: _handled("UPDATE_ROWS_COMPRESSED_EVENT_V1", "rows before and after"),
    168: _harmless("DELETE_ROWS_COMPRESSED_EVENT_V1", _DELETED),
    169: _handled("WRITE_ROWS_COMPRESSED_EVENT", "inserted rows"),
    170: _handled("UPDATE_ROWS_COMPRESSED_EVENT", "rows before and after"),
    171: _harmless("DELETE_ROWS_COMPRESSED_EVENT", _DELETED),
    FRAGMENT: _handled("PARTIAL_ROW_DATA_EVENT", "a part of a long row event, whose table its first part names"),
}


def refusal_of(kind: int, flags: int) -> str | None:
    """Why a bridge must stop at an event that it does not handle; None if it may skip the event."""
    event_type = EVENT_TYPES.get(kind)
    if event_type is None:
        if flags & MAY_BE_IGNORED:
            return None
        return f"the source writes events of a type that this bridge does not know ({kind}): upgrade the bridge"
    return event_type.why if event_type.treatment is Treatment.REFUSED else None
