"""What the shop promises: an order and its points, both or neither, once, whatever dies in between."""

import threading
import time

import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient
from shop.models import Order
from shop.points import Placed, book, consumer, engine
from sqlalchemy.orm import Session

from notify.client import DeadLetter
from notify.testing import InMemoryServer


def orders() -> int:
    with Session(engine) as session:
        return session.scalar(sa.select(sa.func.count(Order.id))) or 0


def test_an_order_and_its_message_are_committed_together(client: TestClient, server: InMemoryServer) -> None:
    before = len(server.messages("order.placed"))
    assert client.post("/orders?item=book&customer=7").json() == {"ordered": "book"}
    message = server.wait_for("order.placed", before + 1)[-1]
    assert message.json() == {"item": "book", "customer": 7} and message.key == "7"
    assert orders() == 1


def test_an_outcome_that_is_lost_is_asked_for(client: TestClient, server: InMemoryServer) -> None:
    before = len(server.messages("order.placed"))
    with server.losing_outcomes():  # as if the process died behind its commit
        client.post("/orders?item=pen&customer=7")
    assert orders() == 1 and len(server.messages("order.placed")) == before
    server.advance(10)  # the server asks back, and the database has the answer
    server.wait_until_decided()
    assert len(server.messages("order.placed")) == before + 1


def test_points_are_booked(client: TestClient) -> None:
    thread = threading.Thread(target=consumer.run, kwargs={"signals": False})
    thread.start()
    client.post("/orders?item=book&customer=9")
    while client.get("/points/9").json() != {"points": 10}:
        assert thread.is_alive()
        time.sleep(0.05)  # between two looks
    consumer.stop()
    thread.join()


def test_an_unknown_item_is_a_dead_letter(client: TestClient) -> None:
    with Session(engine) as session, pytest.raises(DeadLetter, match="the price of 'cloud'"):
        book(Placed("cloud", 7), session)
