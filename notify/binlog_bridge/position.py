"""A bridge's position in a binlog: a set of GTIDs, which any server with the same history can continue from."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, fields

from notify.errors import InvalidRequest

_MARIADB = re.compile(r"\d+-\d+-\d+\Z")
_MYSQL = re.compile(r"([0-9a-f-]{36})((?::\d+(?:-\d+)?)+)\Z")


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
class MySqlSet:
    """Intervals of transaction numbers by server UUID."""

    intervals: dict[str, list[list[int]]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> MySqlSet:
        """Raises InvalidRequest if `text` is not a GTID set of MySQL."""
        gtids = cls()
        for part in filter(None, (p.strip().lower() for p in text.replace("\n", "").split(","))):
            match = _MYSQL.match(part)
            if match is None:
                raise InvalidRequest(
                    f"{part[:60]!r} is not a GTID set of MySQL (uuid:1-5); a bridge cannot read GTIDs with tags"
                )
            for interval in match[2][1:].split(":"):
                first, _, last = interval.partition("-")
                gtids.insert(match[1], int(first), int(last or first))
        return gtids

    def add(self, uuid: str, number: int) -> None:
        intervals = self.intervals.get(uuid)
        if intervals and intervals[-1][1] + 1 == number:
            intervals[-1][1] = number
        else:
            self.insert(uuid, number, number)

    def has(self, text: str) -> bool:
        """Whether it contains every transaction of another set."""
        return all(
            any(a <= first and last <= b for a, b in self.intervals.get(uuid, []))
            for uuid, intervals in MySqlSet.parse(text).intervals.items()
            for first, last in intervals
        )

    reaches = has

    def insert(self, uuid: str, first: int, last: int) -> None:
        """Add the transactions from `first` to `last`."""
        merged: list[list[int]] = []
        for a, b in sorted([*self.intervals.get(uuid, []), [first, last]]):
            if merged and a <= merged[-1][1] + 1:
                merged[-1][1] = max(merged[-1][1], b)
            else:
                merged.append([a, b])
        self.intervals[uuid] = merged

    def __str__(self) -> str:
        return ",".join(
            uuid + "".join(f":{a}" if a == b else f":{a}-{b}" for a, b in intervals)
            for uuid, intervals in sorted(self.intervals.items())
        )


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

    @property
    def text(self) -> str:
        return json.dumps({name: getattr(self, name) for name in _FIELDS})

    @classmethod
    def of(cls, text: str) -> Position | None:
        """The position that a queue has stored; None if `text` is empty. Raises InvalidRequest."""
        if not text:
            return None
        try:
            stored = json.loads(text)
            # An older bridge stored only the first three fields.
            later = (int(stored.get(name, 0)) for name in _FIELDS[3:])
            return cls(str(stored["gtids"]), str(stored["file"]), int(stored["offset"]), *later)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InvalidRequest(
                f"the queue stands at {text[:100]!r} for this source, which is not a position of a binlog: "
                "another kind of bridge or relay wrote it; give this bridge another --source"
            ) from None


_FIELDS = tuple(field.name for field in fields(Position))
