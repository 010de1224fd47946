"""The smallest business: orders in a table, and an engine as a careful service makes it."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from notify.client import use_explicit_begin


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str] = mapped_column(sa.String(50))


def make_engine(url: str) -> sa.Engine:
    """An engine for a URL of any database. SQLite waits for its lock and begins its transactions itself."""
    if url.startswith("sqlite"):
        engine = sa.create_engine(url, connect_args={"timeout": 60})
        use_explicit_begin(engine)
        return engine
    return sa.create_engine(url)
