"""Reads the shop's two databases: the orders and effects of each process during the run, and the final counts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from notify.cli.demo_shop.proof import Proof
from notify.cli.demo_shop.shop import Points, ShopOrder, make_tables, open_engine
from notify.errors import NotifyError


@dataclass(frozen=True, slots=True)
class Counts:
    """Committed orders and effects by process; each life of a process has its own name."""

    orders: dict[str, int]
    effects: dict[str, int]

    @property
    def committed(self) -> int:
        return sum(self.orders.values())

    @property
    def taken_effect(self) -> int:
        return sum(self.effects.values())

    def of(self, process: str) -> int:
        """The counts of a process since it started."""
        return self.orders.get(process, 0) + self.effects.get(process, 0)


class Books:
    """The database of orders and the database of effects; they may be the same."""

    def __init__(self, shop: str, effects: str) -> None:
        """Makes the tables. Raises NotifyError if a database cannot be used, or has orders of an earlier demo."""
        try:
            for dsn in dict.fromkeys((shop, effects)):
                make_tables(dsn)
        except (sa.exc.SQLAlchemyError, ImportError) as error:
            raise NotifyError(f"the demo's database cannot be used: {str(error).splitlines()[0]}") from error
        self._shop, self._effects = open_engine(shop), open_engine(effects)
        if self.counts().orders:
            self.close()
            raise NotifyError("the database holds an earlier demo's orders; give the demo an empty one")

    def counts(self) -> Counts:
        """Count effects first, then orders, so that the order of each counted effect is counted, too."""
        effects = _numbers(self._effects, sa.select(Points.process, sa.func.count()).group_by(Points.process))
        orders = _numbers(self._shop, sa.select(ShopOrder.process, sa.func.count()).group_by(ShopOrder.process))
        return Counts(orders, effects)

    def prove(self, proof: Proof, attempts: Path) -> None:
        """Write the counts into the proof. `attempts`: the file with every order that was begun."""
        attempted = set(attempts.read_text().split())
        with self._shop.connect() as connection:
            orders = set(connection.scalars(sa.select(ShopOrder.number)))
        by_order = sa.select(Points.order_number, sa.func.count()).group_by(Points.order_number)
        effects = _numbers(self._effects, by_order)
        proof.attempts = len(attempted)
        proof.committed = len(orders)
        proof.not_committed = len(attempted - orders)
        proof.effects = sum(effects.values())
        proof.exactly_once = sum(1 for number in orders if effects.get(number) == 1)
        proof.missing = len(orders - effects.keys())
        proof.doubled = sum(1 for count in effects.values() if count > 1)
        proof.ghosts = len(effects.keys() - orders)
        proof.proved = True

    def close(self) -> None:
        self._shop.dispose()
        self._effects.dispose()


def _numbers(engine: sa.Engine, statement: sa.Executable) -> dict[str, int]:
    """The rows (name, number) of a statement."""
    with engine.connect() as connection:
        return {str(row[0]): int(row[1]) for row in connection.execute(statement)}
