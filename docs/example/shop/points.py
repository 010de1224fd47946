"""The consumer: `python -m shop.points`."""

from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.client import Consumer, DeadLetter, Inbox
from shop import settings
from shop.models import Points

engine = sa.create_engine(settings.DATABASE)
consumer = Consumer(settings.NOTIFY, group="points", inbox=Inbox(engine))
PRICES = {"book": 10, "pen": 1}


@dataclass
class Placed:
    """The body of `order.placed`; one that does not fit is a dead letter at once."""

    item: str
    customer: int


@consumer.subscribe("order.placed", mode="ordered", start="earliest")
def book(order: Placed, session: Session) -> None:
    """Return: done. Raise: tried again later. Raise DeadLetter: an operator has to look at it."""
    if order.item not in PRICES:
        raise DeadLetter(f"nothing is known of the price of {order.item!r}")
    # The row of the inbox commits with this one: however often the message comes, the points are booked once.
    session.add(Points(customer=order.customer, points=PRICES[order.item]))


if __name__ == "__main__":
    consumer.run()
