"""The state of a watch in one SQLite file: position, reported findings, and unsent lines and alarms.

A window's findings, its lines, its alarms and the new position are one transaction: after a kill all of them are
stored, or none is and the window is audited again. The tables are bounded.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from notify.errors import Conflict, InvalidRequest, Unavailable

MOST_KNOWN = 200_000
"""The most findings that the watch knows by their keys. Those seen longest ago are forgotten."""
MOST_FORGOTTEN = 100_000
"""The most windows of which findings were forgotten."""
MOST_ALARMS = 10_000
"""The most alarms that wait for their receiver; beyond that the oldest are dropped, which is an alarm."""
DROPPED = "DROPPED"
_VERSION = 1
"""The version of the tables' layout. A file without one is older, and has the same layout."""
# `revised` counts the revisions of a finding and its returns: it is odd while the finding is revised.
_TABLES = """
CREATE TABLE IF NOT EXISTS position (next_us INTEGER, window INTEGER, attempts INTEGER, quiet_since_us INTEGER,
    file_number INTEGER, file_offset INTEGER);
CREATE TABLE IF NOT EXISTS known (key TEXT PRIMARY KEY, window_us INTEGER, seen INTEGER, revised INTEGER) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS known_by_window ON known (window_us);
CREATE INDEX IF NOT EXISTS known_by_seen ON known (seen);
CREATE TABLE IF NOT EXISTS forgotten (window_us INTEGER PRIMARY KEY);
CREATE TABLE IF NOT EXISTS looks (name TEXT PRIMARY KEY, begin_us INTEGER, next_us INTEGER, window INTEGER,
    attempts INTEGER) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS conditions (key TEXT PRIMARY KEY, since_us INTEGER) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS segments (log TEXT, base INTEGER, created_us INTEGER, end_at INTEGER, crc INTEGER,
    read_us INTEGER, PRIMARY KEY (log, base)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS inputs (identity TEXT PRIMARY KEY, name TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS changed (before_us INTEGER);
CREATE TABLE IF NOT EXISTS lines (id INTEGER PRIMARY KEY AUTOINCREMENT, body TEXT);
CREATE TABLE IF NOT EXISTS alarms (id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT, body TEXT, tries INTEGER DEFAULT 0,
    due_us INTEGER DEFAULT 0);
"""


@dataclass(slots=True)
class Position:
    """`attempts`: how often the audit of the next window began and did not return."""

    next_us: int
    window: int = 0
    attempts: int = 0
    quiet_since_us: int = 0
    """Since when nothing at all was there to audit; 0: something was."""
    file_number: int = 1
    file_offset: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a look at earlier windows is: up to `next_us`, and its last turn was after window number `window`.

    `attempts`: how often its next audit began and did not end.
    """

    name: str
    begin_us: int
    next_us: int
    window: int = 0
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class Noted:
    """A segment as it was read: bytes [base, end) of a log, by its name, with their checksum. Instants are in
    microseconds since 1970."""

    log: str
    base: int
    created_us: int
    end: int
    crc: int
    read_us: int


@dataclass(frozen=True, slots=True)
class Alarm:
    id: int
    key: str
    body: dict[str, Any]
    tries: int


class Ledger:
    """One process at a time has it. Raises Conflict where another has, InvalidRequest for a file that is damaged, and
    Unavailable for one that cannot be opened or written, such as on a full disk."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        path = directory / "watch.db"
        try:
            self._db = sqlite3.connect(path, timeout=0, isolation_level=None)
        except sqlite3.Error as error:
            raise Unavailable(f"the watch's state in {path} cannot be opened: {error}") from None
        try:
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("BEGIN EXCLUSIVE")
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version <= _VERSION:
                for statement in _TABLES.split(";"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {_VERSION}")
            self._db.execute("COMMIT")
            row = None
            if version <= _VERSION:
                row = self._db.execute(f"SELECT {', '.join(Position.__slots__)} FROM position").fetchone()
        except sqlite3.OperationalError as error:
            self._db.close()
            if error.sqlite_errorcode in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise Conflict(f"another watch has the state in {directory}: {error}", "watch_runs") from None
            raise Unavailable(f"the watch's state in {path} cannot be opened: {error}") from None
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise InvalidRequest(
                f"the watch's state in {path} is damaged ({error}): move it elsewhere, and give with --from the time "
                "from which windows are audited"
            ) from None
        if version > _VERSION:
            self._db.close()
            raise InvalidRequest(
                f"the watch's state in {path} was written by a newer version of Notify: use that version, or another "
                "--state"
            )
        self.position: Position | None = Position(*row) if row is not None else None
        """The committed position; None for a new state."""

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Make all changes within the context, or none."""
        before = self.position
        self._db.execute("BEGIN")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            self.position = before
            if self._db.in_transaction:  # SQLite may have ended it already, such as on a full disk
                self._db.execute("ROLLBACK")
            raise

    def move(self, position: Position) -> None:
        self._db.execute("DELETE FROM position")
        fields = [getattr(position, name) for name in Position.__slots__]
        names = ", ".join(Position.__slots__)
        self._db.execute(f"INSERT INTO position ({names}) VALUES ({', '.join('?' * len(fields))})", fields)
        self.position = position

    # --- findings ---------------------------------------------------------------------------------------------

    def is_known(self, key: str) -> bool:
        """Whether a finding was reported, and not revised since."""
        row = self._db.execute("SELECT revised % 2 FROM known WHERE key = ?", [key]).fetchone()
        return row is not None and not row[0]

    def returns(self, key: str) -> int:
        """How often a finding was revised and reported again; it is not revised now."""
        row = self._db.execute("SELECT revised / 2 FROM known WHERE key = ?", [key]).fetchone()
        return int(row[0]) if row is not None else 0

    def know(self, key: str, window_us: int, seen: int) -> None:
        """Record that a finding of a window was reported, or seen again."""
        self._db.execute(
            "INSERT INTO known VALUES (?, ?, ?, 0) ON CONFLICT (key) DO UPDATE SET "
            "seen = excluded.seen, revised = revised + revised % 2, "
            "window_us = iif(revised % 2, excluded.window_us, window_us)",
            [key, window_us, seen],
        )

    def revise(self, key: str) -> None:
        """Record that a finding no longer applies, or a failure is over."""
        self._db.execute("UPDATE known SET revised = revised + 1 WHERE key = ? AND revised % 2 = 0", [key])

    def said_between(self, from_us: int, to_us: int) -> list[tuple[int, str]]:
        """The unrevised findings of windows from `from_us` to `to_us`: each window's start and the key, in order."""
        return list(
            self._db.execute(
                "SELECT window_us, key FROM known WHERE window_us >= ? AND window_us < ? AND revised % 2 = 0 "
                "ORDER BY window_us, key",
                [from_us, to_us],
            )
        )

    def forget(self) -> None:
        """Keep the table of findings within its bound, and note of which windows it lacks some."""
        (count,) = self._db.execute("SELECT count(*) FROM known").fetchone()
        if count <= MOST_KNOWN:
            return
        oldest, most = "FROM known ORDER BY seen LIMIT ?", [count - MOST_KNOWN]
        self._db.execute(f"INSERT OR IGNORE INTO forgotten SELECT window_us {oldest}", most)
        self._db.execute(f"DELETE FROM known WHERE key IN (SELECT key {oldest})", most)
        newest = "SELECT window_us FROM forgotten ORDER BY window_us DESC LIMIT ?"
        self._db.execute(f"DELETE FROM forgotten WHERE window_us NOT IN ({newest})", [MOST_FORGOTTEN])

    def has_forgotten(self, window_us: int) -> bool:
        """Whether a window had findings that were forgotten."""
        return self._db.execute("SELECT 1 FROM forgotten WHERE window_us = ?", [window_us]).fetchone() is not None

    # --- looks at earlier windows -----------------------------------------------------------------------------

    def look(self, name: str) -> Progress | None:
        """The position of a look; None if it never began."""
        row = self._db.execute("SELECT * FROM looks WHERE name = ?", [name]).fetchone()
        return Progress(*row) if row is not None else None

    def move_look(self, at: Progress) -> None:
        fields = [at.name, at.begin_us, at.next_us, at.window, at.attempts]
        self._db.execute("INSERT OR REPLACE INTO looks VALUES (?, ?, ?, ?, ?)", fields)

    # --- conditions -------------------------------------------------------------------------------------------

    def conditions(self) -> set[str]:
        """The conditions of the last window, such as a stalled input."""
        return {row[0] for row in self._db.execute("SELECT key FROM conditions")}

    def set_condition(self, key: str, since_us: int) -> None:
        self._db.execute("INSERT OR IGNORE INTO conditions VALUES (?, ?)", [key, since_us])

    def end_condition(self, key: str) -> None:
        self._db.execute("DELETE FROM conditions WHERE key = ?", [key])

    # --- segments of logs -------------------------------------------------------------------------------------

    def segments(self, log: str) -> list[Noted]:
        """All noted segments of a log."""
        return [Noted(*row) for row in self._db.execute("SELECT * FROM segments WHERE log = ?", [log])]

    def note_segment(self, noted: Noted) -> None:
        fields = [noted.log, noted.base, noted.created_us, noted.end, noted.crc, noted.read_us]
        self._db.execute("INSERT OR REPLACE INTO segments VALUES (?, ?, ?, ?, ?, ?)", fields)

    def forget_segment(self, noted: Noted) -> None:
        self._db.execute("DELETE FROM segments WHERE log = ? AND base = ?", [noted.log, noted.base])

    # --- inputs -----------------------------------------------------------------------------------------------

    def take_inputs(self, now: Mapping[str, str], next_us: int) -> list[str]:
        """Record the inputs of a window, by identity; returns the names of earlier ones that are missing. If there are
        any, findings of windows before `next_us` are those of other inputs."""
        known = dict(self._db.execute("SELECT identity, name FROM inputs"))
        if known == now:
            return []
        gone = sorted(known.keys() - now.keys())
        self._db.execute("DELETE FROM inputs")
        self._db.executemany("INSERT INTO inputs VALUES (?, ?)", now.items())
        if gone:
            self._db.execute("DELETE FROM changed")
            self._db.execute("INSERT INTO changed VALUES (?)", [next_us])
        return [known[identity] for identity in gone]

    @property
    def changed_us(self) -> int:
        """Windows before this instant were audited with other inputs; 0: none were."""
        return int((self._db.execute("SELECT before_us FROM changed").fetchone() or (0,))[0])

    # --- on their way -----------------------------------------------------------------------------------------

    def add_lines(self, lines: Iterable[dict[str, Any]]) -> None:
        self._db.executemany("INSERT INTO lines (body) VALUES (?)", ([json.dumps(line)] for line in lines))

    def lines(self, most: int) -> list[tuple[int, str]]:
        """The next lines for the file, with their numbers."""
        return list(self._db.execute("SELECT id, body FROM lines ORDER BY id LIMIT ?", [most]))

    def written(self, last: int) -> None:
        """Delete lines up to this number, which are in the file now."""
        self._db.execute("DELETE FROM lines WHERE id <= ?", [last])

    def add_alarm(self, key: str, body: dict[str, Any]) -> None:
        self._db.execute("INSERT INTO alarms (key, body) VALUES (?, ?)", [key, json.dumps(body)])

    def bound_alarms(self) -> None:
        """Drop the oldest alarms beyond the bound; one alarm counts them."""
        (count,) = self._db.execute("SELECT count(*) FROM alarms WHERE key <> ?", [DROPPED]).fetchone()
        surplus = count - MOST_ALARMS
        if surplus <= 0:
            return
        oldest = "SELECT id FROM alarms WHERE key <> ? ORDER BY id LIMIT ?"
        self._db.execute(f"DELETE FROM alarms WHERE id IN ({oldest})", [DROPPED, surplus])
        earlier = self._db.execute("SELECT body FROM alarms WHERE key = ?", [DROPPED]).fetchone()
        dropped = surplus + (json.loads(earlier[0])["dropped"] if earlier else 0)
        self._db.execute("DELETE FROM alarms WHERE key = ?", [DROPPED])
        detail = f"{dropped} alarms were dropped, because the receiver was unreachable for too long: see findings.jsonl"
        self.add_alarm(DROPPED, {"kind": "dropped", "key": DROPPED, "dropped": dropped, "detail": detail})

    def alarms(self, now_us: int, most: int) -> list[Alarm]:
        """The due alarms, in their order."""
        rows = self._db.execute(
            "SELECT id, key, body, tries FROM alarms WHERE due_us <= ? ORDER BY id LIMIT ?", [now_us, most]
        )
        return [_alarm(*row) for row in rows]

    def alarms_waiting(self) -> int:
        return int(self._db.execute("SELECT count(*) FROM alarms").fetchone()[0])

    def alarm_done(self, number: int) -> None:
        self._db.execute("DELETE FROM alarms WHERE id = ?", [number])

    def alarm_refused(self, number: int, due_us: int) -> None:
        self._db.execute("UPDATE alarms SET tries = tries + 1, due_us = ? WHERE id = ?", [due_us, number])


def _alarm(number: int, key: str, body: str, tries: int) -> Alarm:
    read: dict[str, Any] = json.loads(body)
    if key == DROPPED:  # a higher count makes it another alarm
        key = read["key"] = f"{DROPPED}:{number}"
    return Alarm(number, key, read, tries)
