"""Ways to harm a trade, by SQL and by bytes of files."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from dataclasses import replace

from notify.storage.log.format import FRAME_HEADER_SIZE, FRAME_MAGIC, SEGMENT_HEADER_SIZE
from tests.audit.trade import SERVICES, WITH_INBOX, write_log
from tests.audit.world import World

HOURS_US = 3 * 3_600_000_000
MINUTES_US = 5 * 60_000_000


# --- databases ------------------------------------------------------------------------------------------------------


def sql(service: str, *statements: str) -> Callable[[World], None]:
    """Run statements; `{name}` and `{middle}` stand for the first transaction's id and the middle one's."""

    def harm(world: World) -> None:
        names = {"first": world.trade.name(0), "middle": world.trade.name(world.trade.count // 2)}
        world.trade.execute(service, *[s.format(**names) for s in statements])

    return harm


def both_tables_wiped(world: World) -> None:
    for service in SERVICES:
        world.trade.execute(service, "DELETE FROM half_message", "DELETE FROM notify_inbox")


def dropped(service: str, table: str) -> Callable[[World], None]:
    return sql(service, f"DROP TABLE {table}")


def not_given(service: str) -> Callable[[World], object]:
    return lambda world: world.databases.pop(service)


def exchanged(table: str) -> Callable[[World], None]:
    """Exchange a table of the two senders' databases."""

    def harm(world: World) -> None:
        bank = world.trade.directory / "bank.db"
        world.trade.execute(
            "shop", f"ATTACH DATABASE '{bank}' AS bank", f"CREATE TEMP TABLE kept AS SELECT * FROM main.{table}",
            f"DELETE FROM main.{table}", f"INSERT INTO main.{table} SELECT * FROM bank.{table}",
            f"DELETE FROM bank.{table}", f"INSERT INTO bank.{table} SELECT * FROM kept",
        )  # fmt: skip

    return harm


def rows_of(service: str, table: str, to: str) -> Callable[[World], None]:
    """Put a copy of a table's rows into another database."""

    def harm(world: World) -> None:
        place = world.trade.directory / f"{service}.db"
        world.trade.execute(
            to, f"ATTACH DATABASE '{place}' AS origin", f"INSERT INTO main.{table} SELECT * FROM origin.{table}"
        )

    return harm


def same_database_twice(world: World) -> None:
    world.databases["again"] = world.databases["shop"]


def clone_beside(world: World) -> None:
    place = world.trade.directory
    shutil.copy(place / f"{WITH_INBOX}.db", place / "clone.db")
    world.databases["clone"] = world.trade.url("clone")


def foreign_beside(service: str) -> Callable[[World], None]:
    def harm(world: World) -> None:
        world.databases["foreign"] = world.other.url(service)

    return harm


def foreign_instead(world: World) -> None:
    world.databases["bank"] = world.other.url("bank")


def all_foreign(world: World) -> None:
    world.databases = {service: world.other.url(service) for service in SERVICES}


def shifted(table: str, service: str, by_us: int) -> Callable[[World], None]:
    """Move the times of all rows of a table."""
    way = f"{'+' if by_us > 0 else '-'}{HOURS_US // 3_600_000_000} hours"
    return lambda world: _shift(world, service, table, way)


def _shift(world: World, service: str, table: str, way: str) -> None:
    moved = f"strftime('%Y-%m-%d %H:%M:%S', created_at, '{way}') || substr(created_at, 20)"
    world.trade.execute(service, f"UPDATE {table} SET created_at = {moved}")


def clock_ahead(world: World) -> None:
    """The database's clock is hours ahead, and so are the rows that it wrote."""
    world.clocks["bank"] = HOURS_US
    shifted("half_message", "bank", HOURS_US)(world)


def clock_a_little_ahead(world: World) -> None:
    world.clocks["bank"] = MINUTES_US
    way = f"+{MINUTES_US // 60_000_000} minutes"
    _shift(world, "bank", "half_message", way)


def names_exchanged(world: World) -> None:
    shop, bank = world.databases["shop"], world.databases["bank"]
    world.databases |= {"shop": bank, "bank": shop}


# --- logs -----------------------------------------------------------------------------------------------------------


def segment_gone(number: int) -> Callable[[World], None]:
    return lambda world: world.segment(number).unlink()


def all_segments_but_the_last(world: World) -> None:
    for path in world.trade.segments()[:-1]:
        path.unlink()


def segment_cut(number: int) -> Callable[[World], None]:
    """Cut a segment's file off in its middle, within a frame."""

    def harm(world: World) -> None:
        path = world.segment(number)
        data = path.read_bytes()
        begins = frames_of(data)
        with path.open("r+b") as file:
            file.truncate(begins[len(begins) // 2] + FRAME_HEADER_SIZE + 10)

    return harm


def segment_empty(number: int) -> Callable[[World], None]:
    return lambda world: world.segment(number).write_bytes(b"")


def indexes_gone(world: World) -> None:
    world.trade.without_index()


def checkpoints_gone(world: World) -> None:
    for path in world.trade.log.glob("*.ckpt"):
        path.unlink()


def checkpoint_and_first_segment_gone(world: World) -> None:
    checkpoints_gone(world)
    world.segment(0).unlink()


def last_segment_and_checkpoint_gone(world: World) -> None:
    checkpoints_gone(world)
    world.segment(-1).unlink()


def checkpoints_empty(world: World) -> None:
    for path in world.trade.log.glob("*.ckpt"):
        path.write_bytes(b"")


def two_segments_exchanged(world: World) -> None:
    one, two = world.segment(2), world.segment(3)
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)


def segment_of_another_log(number: int) -> Callable[[World], None]:
    def harm(world: World) -> None:
        shutil.copy(world.other.segments()[number], world.segment(number))

    return harm


def log_of_before(world: World) -> None:
    """The log is as it was when half of it was written: an old copy."""
    segments = world.trade.segments()
    for path in segments[len(segments) // 2 :]:
        path.unlink()
    checkpoints_gone(world)
    segment_cut(-1)(world)


def no_segment(world: World) -> None:
    for path in world.trade.segments():
        path.unlink()


def other_log(world: World) -> None:
    world.logs = [world.other.log]


def other_log_beside(world: World) -> None:
    world.logs.append(world.other.log)


def same_log_twice(world: World) -> None:
    world.logs.append(world.trade.log)


def copy_of_the_log(world: World) -> None:
    copy = world.trade.directory / "copy"
    shutil.copytree(world.trade.log, copy)
    world.logs.append(copy)


def log_clock(by_us: int) -> Callable[[World], None]:
    """The server's clock was hours off: all times of its log are."""

    def harm(world: World) -> None:
        shutil.rmtree(world.trade.log)
        write_log(replace(world.trade, ahead_us=by_us))

    return harm


def frames_of(data: bytes) -> list[int]:
    """Where each frame of a segment begins."""
    frames = []
    at = SEGMENT_HEADER_SIZE
    while data[at : at + 4] == FRAME_MAGIC:
        frames.append(at)
        at += FRAME_HEADER_SIZE + struct.unpack_from("<I", data, at + 4)[0]
    return frames
