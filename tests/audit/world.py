"""A copy of a sound trade to harm, and what an audit of it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from notify.spark.inputs.databases import Database
from notify.spark.inputs.log_input import LogInput
from notify.spark.result import Inputs
from tests.audit.trade import SERVICES, Trade, service_of


@dataclass
class World:
    """A trade to harm, and what an audit of it is given."""

    trade: Trade
    other: Trade
    """A sound trade of other services, on another server."""
    databases: dict[str, str] = field(default_factory=dict)
    """The URLs that the audit is given, by name."""
    logs: list[Path] = field(default_factory=list)
    clocks: dict[str, int] = field(default_factory=dict)
    """How many microseconds the clock of a database is ahead, by its name."""

    @contextmanager
    def inputs(self) -> Iterator[Inputs]:
        with ExitStack() as stack:
            databases = []
            for name, url in self.databases.items():
                database = Database(url, name)
                stack.callback(database.close)
                database.clock_offset_us += self.clocks.get(name, 0)
                databases.append(database)
            yield Inputs(databases, [LogInput(log) for log in self.logs])

    def segment(self, number: int) -> Path:
        return self.trade.segments()[number]


def world_of(sound: Trade, other: Trade, to: Path) -> World:
    """A copy of a trade, with all its inputs."""
    trade = sound.copy(to)
    return World(trade, other, {service: trade.url(service) for service in SERVICES}, [trade.log])


Ids = Callable[[World], set[str]]
"""The messages that a class must name, exactly."""


def every(world: World) -> set[str]:
    return {world.trade.message(n) for n in range(world.trade.count)}


def all_but_first(world: World) -> set[str]:
    return every(world) - {world.trade.message(0)}


def of_the_bank(world: World) -> set[str]:
    return {world.trade.message(n) for n in range(world.trade.count) if service_of(n) == "bank"}


def of_the_shop(world: World) -> set[str]:
    return every(world) - of_the_bank(world)


def older_of_the_bank(world: World) -> set[str]:
    middle = world.trade.message(world.trade.count // 2)
    return {message for message in of_the_bank(world) if message < middle}


def of_the_other(world: World) -> set[str]:
    return {world.other.message(n) for n in range(world.other.count)}
