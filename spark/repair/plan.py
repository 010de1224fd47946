"""The plan of a repair: what would be done for which finding, each item with its evidence, as a file for people.

A person may take items out of the file. Each item is checked again before it is carried out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from notify.errors import InvalidRequest
from notify.protocol.wire import UNDECODABLE
from notify.spark.repair.journal import journal_of

VERSION = 1
MOST_WITHOUT_FORCE = 500
"""This many findings rarely have separate causes: a person who knows the cause passes --force."""
Action = Literal["decide", "republish", "redeliver"]


class Identity(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which database or log an input is."""

    source: str = ""
    """A database's id."""
    segment: tuple[int, int] = (0, 0)
    """A log's newest segment: its first byte, and when it was made (microseconds since 1970)."""
    end: int = 0
    """The durable end of a log that was read, in bytes; otherwise the end of its files."""
    segments: tuple[tuple[int, int], ...] = ()
    """All segments, as `segment`."""

    def differs(self, known: Identity) -> str:
        """Why this input is not `known`, or is an older copy; "" if it is the same."""
        if self.source != known.source:
            return f"its source id is {self.source or '(none)'}, and was {known.source or '(none)'}"
        if self.end < known.end:
            return f"it ends at byte {self.end}, and ended at {known.end}: it is an older copy"
        is_dropped = bool(self.segments) and known.segment[0] < self.segments[0][0]  # by retention
        if known.segment != (0, 0) and not is_dropped and known.segment not in self.segments:
            return f"it has no segment at byte {known.segment[0]} made at that time: it is another log"
        return ""


class Item(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One repair. `key` is the same for it in every plan."""

    key: str
    action: Action
    finding: str
    message_id: str
    what: str
    """The reason in words."""
    outcome: str = ""
    """`decide`: commit or rollback, as the database said when the plan was made."""
    group: str = ""
    """`redeliver`: the group that gets the message."""
    again: str = ""
    """The id under which the message is sent again. Its consumers see the first id, too: their inboxes know it."""
    content: str = ""
    """`republish`: a digest of the message as the local row has it; empty where the server's half has it."""
    skipped_by: tuple[str, ...] = ()
    """`republish`: groups in which the message took effect before its log was lost: their inboxes skip it."""
    evidence: dict[str, Any] = {}


class Held(msgspec.Struct, frozen=True):
    """A finding that is not repaired, and why."""

    finding: str
    message_id: str
    why: str
    evidence: dict[str, Any] = {}


class RepairPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`doubts`: why the audit does not justify repairs; then there are items only if a person forced the plan."""

    notify_repair_plan: int
    made_at: str
    audited_from: str
    audited_to: str
    inputs: list[str]
    """The names of databases and queues: a repair looks at all of them again."""
    verdict: str
    counts: dict[str, int]
    doubts: list[str]
    needs_force: list[str]
    """Signs that a whole input is lost: a person who knows better passes --force."""
    items: list[Item]
    held_back: list[Held]
    identities: dict[str, Identity] = {}
    """The identity of each input, by name."""
    unread: list[str] = []
    """The parts of logs that could not be read when the plan was made."""
    effects: list[tuple[str, str]] = []
    """The queries of --effects of the plan's audit, each with the name of its database: a repair asks them again."""
    groups: list[str] = []
    """The consumer groups that were known, for these queries."""

    def check_inputs(self, names: Sequence[str], identities: Mapping[str, Identity]) -> None:
        """Raises InvalidRequest if an input of the audit is missing, or is another one or an older copy: an effect, or
        a place in a queue, may be recorded there."""
        missing = sorted(set(self.inputs) - set(names))
        if missing:
            raise InvalidRequest(f"--repair: give the inputs of the plan's audit, too: {', '.join(missing)}")
        for name, known in self.identities.items():
            if why := identities[name].differs(known):
                raise InvalidRequest(f"--repair: {name} is not the one that the plan's audit read: {why}")

    def check_force(self, *, force: bool) -> None:
        """Raises InvalidRequest if a plan needs force, and `force` is not given."""
        why = [f"the audit doubts itself: {doubt}" for doubt in self.doubts[:1]]
        if self.items:
            why += self.needs_force
        if len(self.items) > MOST_WITHOUT_FORCE:
            why.append(f"{len(self.items):,} repairs at once (more than {MOST_WITHOUT_FORCE}) usually have one cause")
        if why and not force:
            raise InvalidRequest(f"--repair: {'; '.join(why)}. Look at the plan; --force carries it out anyway")

    def write(self, path: Path) -> None:
        """Write the plan durably, for people. Raises InvalidRequest if a plan or a journal exists there."""
        if path.exists():
            raise InvalidRequest(f"--plan: {path} exists; a plan is not overwritten, it may be half carried out")
        if journal_of(path).exists():
            raise InvalidRequest(
                f"--plan: {journal_of(path)} stands there, the journal of an earlier plan: move it away, or choose "
                "another name"
            )
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with temporary.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)


def read_plan(path: Path) -> RepairPlan:
    """Raises InvalidRequest if a file is not a plan of this version."""
    try:
        plan = msgspec.json.decode(path.read_bytes(), type=RepairPlan)
    except OSError as error:
        raise InvalidRequest(f"--repair: {path} cannot be read: {error.strerror}") from None
    except UNDECODABLE as error:
        raise InvalidRequest(f"--repair: {path} is not a plan of `notify audit run --plan`: {error}") from None
    if plan.notify_repair_plan != VERSION:
        raise InvalidRequest(f"--repair: {path} was written by another version; make a new plan")
    keys = [item.key for item in plan.items]
    if len(set(keys)) < len(keys):
        raise InvalidRequest(f"--repair: {path} has an item twice")
    return plan
