"""A bridge's position in a binlog: a set of GTIDs, which any server with the same history can continue from."""

from __future__ import annotations

import re
import struct
import uuid
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field, fields

import msgspec

from notify.errors import InvalidRequest
from notify.protocol.wire import UNDECODABLE

_MARIADB = re.compile(r"\d+-\d+-\d+\Z")
_NUMBERS = r"(?::\d{1,19}(?:-\d{1,19})?)"
_MYSQL = re.compile(
    r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?=:)"
    rf"{_NUMBERS}*(?::[a-z_][a-z0-9_]{{0,31}}{_NUMBERS}+)*\Z"
)
_TAGGED = 1
"""The format of an encoded set in which each server is followed by a tag, which may be empty."""
_SHOWN = 300
_WINDOW = 64
"""How many runs of an origin are written out for each text of its position."""


@dataclass(slots=True)
class MariaDbSet:
    """The last GTID of each replication domain."""

    domains: dict[int, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> MariaDbSet:
        """Raises InvalidRequest if `text` is not a GTID position of MariaDB."""
        domains: dict[int, tuple[int, int]] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            if _MARIADB.match(part) is None:
                raise InvalidRequest(f"{part[:60]!r} is not a GTID of MariaDB (domain-server-number)")
            domain, server, number = (int(n) for n in part.split("-"))
            domains[domain] = (server, number)
        return cls(domains)

    def add(self, domain: int, server: int, number: int) -> None:
        self.domains[domain] = (server, number)

    def has(self, text: str) -> bool:
        """Whether it equals another set in each domain that both sets have."""
        other = MariaDbSet.parse(text)
        shared = [domain for domain in other.domains if domain in self.domains]
        return all(self.domains[d] == other.domains[d] for d in shared) and (bool(shared) or not other.domains)

    def reaches(self, text: str) -> bool:
        """Whether it has reached another set's GTID, or gone beyond it, in each of that set's domains."""
        return all(
            domain in self.domains and self.domains[domain][1] >= number
            for domain, (_, number) in MariaDbSet.parse(text).domains.items()
        )

    def __str__(self) -> str:
        if len(self.domains) == 1:
            ((domain, (server, number)),) = self.domains.items()
            return f"{domain}-{server}-{number}"
        return ",".join(f"{d}-{s}-{n}" for d, (s, n) in sorted(self.domains.items()))


@dataclass(slots=True)
class _Runs:
    """Transaction numbers of one origin: runs from `firsts[i]` to `lasts[i]`, ascending, with gaps between them.

    A server may have tens of thousands of runs, of which one or two change with each batch. So the text of all runs
    before and after a window is kept.
    """

    firsts: list[int] = field(default_factory=list)
    lasts: list[int] = field(default_factory=list)
    _before: int = 0
    _after: int = 0
    """How many runs there are before and after the window; their text is kept."""
    _head: str = ""
    _tail: str = ""
    _changed: int = 0
    """The run that was changed last."""
    _text: str | None = None
    """The whole text; None after a change."""

    @classmethod
    def of(cls, pairs: list[tuple[int, int]]) -> _Runs:
        """The runs of intervals in any order, which may overlap. Raises InvalidRequest."""
        runs = cls()
        firsts, lasts = runs.firsts, runs.lasts
        for first, last in sorted(pairs):
            if not 0 < first <= last:
                raise InvalidRequest(f"{first}-{last} is not an interval of transaction numbers, which count from 1")
            if lasts and first <= lasts[-1] + 1:
                lasts[-1] = max(lasts[-1], last)
            else:
                firsts.append(first)
                lasts.append(last)
        runs._changed = len(firsts) - 1
        return runs

    def add(self, first: int, last: int) -> None:
        firsts, lasts = self.firsts, self.lasts
        begin, end = bisect_left(lasts, first - 1), bisect_right(firsts, last + 1)
        if begin < end:  # the runs from `begin` to `end` grow together with the new one
            first, last = min(first, firsts[begin]), max(last, lasts[end - 1])
        if begin < self._before or end > len(firsts) - self._after:
            self._before = self._after = 0
            self._head = self._tail = ""
        firsts[begin:end], lasts[begin:end] = [first], [last]
        self._changed, self._text = begin, None

    def follow(self, number: int) -> bool:
        """Add a number that directly follows the last run, as most transactions do; False for any other number."""
        if self.lasts[-1] + 1 != number or self._after:
            return False
        self.lasts[-1] = number
        self._text = None
        return True

    def has(self, first: int, last: int) -> bool:
        at = bisect_right(self.firsts, first) - 1
        return at >= 0 and last <= self.lasts[at]

    def text(self) -> str:
        if self._text is None:
            self._text = self._composed()
        return self._text

    def _composed(self) -> str:
        count = len(self.firsts)
        if count - self._before - self._after > _WINDOW:
            self._before = max(0, self._changed - _WINDOW // 4)
            end = min(count, self._changed + _WINDOW // 4)
            self._after = count - end
            self._head, self._tail = self._written(0, self._before), self._written(end, count)
        return self._head + self._written(self._before, count - self._after) + self._tail

    def _written(self, begin: int, end: int) -> str:
        pairs = zip(self.firsts[begin:end], self.lasts[begin:end], strict=True)
        return "".join([f":{first}" if first == last else f":{first}-{last}" for first, last in pairs])


class MySqlSet:
    """Transaction numbers by origin: the UUID of a server, or of a server and a tag (`uuid:tag`, from MySQL 8.3 on)."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: dict[str, _Runs] = {}

    @classmethod
    def parse(cls, text: str) -> MySqlSet:
        """Raises InvalidRequest if `text` is not a GTID set of MySQL."""
        pairs: dict[str, list[tuple[int, int]]] = {}
        for part in filter(None, "".join(text.split()).lower().split(",")):
            if _MYSQL.match(part) is None:
                raise InvalidRequest(f"{part[:60]!r} is not a GTID set of MySQL (uuid:1-5, or with a tag uuid:tag:1-5)")
            server, *words = part.split(":")
            of_origin = pairs.setdefault(server, [])
            for word in words:
                if word[0] > "9":  # a tag begins with a letter or an underscore
                    of_origin = pairs.setdefault(f"{server}:{word}", [])
                    continue
                first, _, last = word.partition("-")
                of_origin.append((int(first), int(last or first)))
        return cls._of(pairs)

    @classmethod
    def decode(cls, body: bytes) -> MySqlSet:
        """Read a set as servers encode it: in a PREVIOUS_GTIDS event and in COM_BINLOG_DUMP_GTID."""
        count, at, has_tags = int.from_bytes(body[:8], "little"), 8, body[7] == _TAGGED
        if has_tags:
            count = count >> 8 & (1 << 48) - 1
        pairs: dict[str, list[tuple[int, int]]] = {}
        for _ in range(count):
            origin, at = server_uuid(body[at : at + 16]), at + 16
            if has_tags:
                size, at = unsigned(body, at)
                if size:
                    origin += ":" + body[at : at + size].decode("ascii")
                    at += size
            (runs,) = struct.unpack_from("<Q", body, at)
            numbers = struct.unpack_from(f"<{2 * runs}q", body, at + 8)
            at += 8 + 16 * runs
            pairs[origin] = [(a, b - 1) for a, b in zip(numbers[::2], numbers[1::2], strict=True)]
        return cls._of(pairs)

    def encode(self) -> bytes:
        """The set as servers read it. A set without tags has the older form: servers before 8.3 know no other."""
        has_tags = any(":" in origin for origin in self._runs)
        count = len(self._runs)
        parts = [struct.pack("<Q", _TAGGED << 56 | count << 8 | _TAGGED if has_tags else count)]
        for origin, runs in sorted(self._runs.items()):
            server, _, tag = origin.partition(":")
            parts.append(uuid.UUID(server).bytes)
            if has_tags:
                parts.append(bytes((len(tag) << 1,)) + tag.encode())
            numbers = [0] * (2 * len(runs.firsts))
            numbers[::2], numbers[1::2] = runs.firsts, [last + 1 for last in runs.lasts]
            parts.append(struct.pack(f"<Q{len(numbers)}q", len(runs.firsts), *numbers))
        return b"".join(parts)

    @classmethod
    def _of(cls, pairs: dict[str, list[tuple[int, int]]]) -> MySqlSet:
        gtids = cls()
        gtids._runs = {origin: _Runs.of(of_origin) for origin, of_origin in pairs.items() if of_origin}
        return gtids

    def union(self, other: MySqlSet) -> MySqlSet:
        """The transactions of both sets."""
        pairs = {origin: list(zip(runs.firsts, runs.lasts, strict=True)) for origin, runs in self._runs.items()}
        for origin, runs in other._runs.items():
            pairs.setdefault(origin, []).extend(zip(runs.firsts, runs.lasts, strict=True))
        return MySqlSet._of(pairs)

    def add(self, origin: str, number: int) -> None:
        """Add a transaction. `origin`: `uuid`, or `uuid:tag`."""
        runs = self._runs.get(origin)
        if runs is None:
            runs = self._runs[origin] = _Runs()
        elif runs.follow(number):
            return
        runs.add(number, number)

    def has(self, text: str) -> bool:
        """Whether it contains every transaction of another set."""
        return self._has(MySqlSet.parse(text))

    def _has(self, other: MySqlSet) -> bool:
        for origin, theirs in other._runs.items():
            ours = self._runs.get(origin)
            if ours is None or not all(map(ours.has, theirs.firsts, theirs.lasts)):
                return False
        return True

    reaches = has

    def __str__(self) -> str:
        """In MySQL's form and order: `uuid:1-5:tag:1-3,uuid:7`."""
        texts: dict[str, list[str]] = {}
        for origin, runs in sorted(self._runs.items()):
            server, _, tag = origin.partition(":")
            texts.setdefault(server, [server]).append((f":{tag}" if tag else "") + runs.text())
        return ",".join(["".join(parts) for parts in texts.values()])


def shown(gtids: object) -> str:
    """A set for people to read: only its beginning, because a set of MySQL may have a megabyte."""
    text = str(gtids)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text):,} characters)"


def server_uuid(raw: bytes) -> str:
    """A server's UUID in the form that MySQL uses in GTIDs."""
    return str(uuid.UUID(bytes=raw))


def unsigned(data: bytes, at: int) -> tuple[int, int]:
    """An integer in the format of MySQL's library `serialization`, and the index after it.

    The first byte ends with as many ones as bytes follow it; the number's bits follow after a zero.
    """
    size = 1
    while size < 9 and data[at] >> size - 1 & 1:
        size += 1
    return int.from_bytes(data[at : at + size], "little") >> min(size, 8), at + size


def tagged_gtid(body: bytes) -> tuple[str, int]:
    """Decode the body of MySQL's GTID_TAGGED event: the origin (`uuid:tag`), and the number.

    The body is a message of numbered fields: 0 flags, 1 the UUID byte by byte, 2 the number, 3 the tag; others follow.
    """
    at = 0
    for _ in range(5):  # the format's version, the size, the last field that a reader must know; 0, and the flags
        _, at = unsigned(body, at)
    raw = bytearray()
    field_ids = []
    for field_id in (1, 2, 3):
        found, at = unsigned(body, at)
        field_ids.append(found)
        if field_id == 1:
            for _ in range(16):
                byte, at = unsigned(body, at)
                raw.append(byte)
        elif field_id == 2:
            number, at = unsigned(body, at)
        else:
            size, at = unsigned(body, at)
    if field_ids != [1, 2, 3]:
        raise ValueError(f"an event of a tagged GTID has fields {field_ids}")
    return f"{server_uuid(bytes(raw))}:{body[at : at + size].decode('ascii')}", number >> 1


GtidSet = MariaDbSet | MySqlSet


def parse(text: str) -> GtidSet:
    """Parse a GTID set of MySQL or MariaDB. Raises InvalidRequest."""
    return MySqlSet.parse(text) if ":" in text else MariaDbSet.parse(text)


def reaches(gtids: str, until: str) -> bool:
    """Whether the set `gtids` has reached the set `until`, or gone beyond it. Raises InvalidRequest."""
    return not until or type(parse(until)).parse(gtids).reaches(until)


@dataclass(slots=True, frozen=True)
class Position:
    """A GTID set, and where it was read. The queue stores and compares `text`."""

    gtids: str
    file: str = ""
    offset: int = 0
    """The offset in the file, in bytes, for people."""
    created: int = 0
    """When the file began, in seconds since 1970, by the file's header; 0: unknown."""
    server: int = 0
    """The id of the server that wrote the file."""
    newest_us: int = 0
    """When the newest transaction was written, in microseconds by the source's clock; 0: unknown."""
    scope: str = ""
    """The schemas whose tables were read up to here: see Scope; "": unknown."""

    @property
    def shown(self) -> str:
        """The set for people to read."""
        return shown(self.gtids)

    def reaches(self, other: Position) -> bool:
        """Whether it has reached another position, or gone beyond it. Raises InvalidRequest."""
        return reaches(self.gtids, other.gtids)

    @property
    def text(self) -> str:
        return msgspec.json.encode({name: getattr(self, name) for name in _FIELDS}).decode()

    @classmethod
    def of(cls, text: str) -> Position | None:
        """The position that a queue has stored; None if `text` is empty. Raises InvalidRequest."""
        if not text:
            return None
        try:
            stored = msgspec.json.decode(text)
            # An older bridge stored only the first three fields.
            created, server, newest_us = (int(stored.get(name, 0)) for name in _FIELDS[3:6])
            gtids, file, scope = str(stored["gtids"]), str(stored["file"]), str(stored.get("scope", ""))
            return cls(gtids, file, int(stored["offset"]), created, server, newest_us, scope)
        except (*UNDECODABLE, ValueError, KeyError, TypeError, AttributeError):
            raise InvalidRequest(
                f"the queue stands at {text[:100]!r} for this source, which is not a position of a binlog: "
                "another kind of bridge or relay wrote it; give this bridge another --source"
            ) from None


_FIELDS = tuple(field.name for field in fields(Position))
