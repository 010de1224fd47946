"""The tables of a history's databases, and the files of its processes' notes."""

from __future__ import annotations

import os
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from notify.client import create_tables, use_explicit_begin


class Base(DeclarativeBase):
    pass


class Intent(Base):
    """A business row: it exists if and only if its transaction committed."""

    __tablename__ = "history_intent"
    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[str] = mapped_column(sa.String(40), unique=True)
    key: Mapped[str] = mapped_column(sa.String(20))
    topic: Mapped[str] = mapped_column(sa.String(20))


class EffectRow(Base):
    """An effect. Only the inbox prevents a second row for an intent."""

    __tablename__ = "history_effect"
    id: Mapped[int] = mapped_column(primary_key=True)
    who: Mapped[str] = mapped_column(sa.String(40))
    number: Mapped[str] = mapped_column(sa.String(40))
    key: Mapped[str] = mapped_column(sa.String(20))
    queue: Mapped[int]
    offset: Mapped[int] = mapped_column(sa.BigInteger)
    committed_at: Mapped[str] = mapped_column(sa.String(40))


def open_engine(dsn: str) -> sa.Engine:
    """An engine that finds its database again after a restart."""
    if dsn.startswith("sqlite"):
        engine = sa.create_engine(dsn, connect_args={"timeout": 30})
        use_explicit_begin(engine)
        return engine
    return sa.create_engine(dsn, pool_pre_ping=True, pool_size=20)


def make_tables(dsn: str) -> None:
    """The history's tables and those of producers and consumers."""
    engine = open_engine(dsn)
    Base.metadata.create_all(engine)
    create_tables(engine)
    engine.dispose()


class Notes:
    """Lines that survive the death of their writer: each is one write to the end of a file."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def add(self, *words: str) -> None:
        os.write(self._fd, ("\t".join(words) + "\n").encode())


def read_notes(path: Path) -> list[list[str]]:
    """The notes in a file, also of a killed process; none if there is no file."""
    if not path.exists():
        return []
    return [line.split("\t") for line in path.read_text().splitlines() if line]
