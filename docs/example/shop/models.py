"""The service's tables."""

from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]
    customer: Mapped[int]


class Points(Base):
    __tablename__ = "points"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[int] = mapped_column(index=True)
    points: Mapped[int]
