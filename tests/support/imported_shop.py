"""A shop as servers of applications load it: its producer is made when the module is imported, which for most of them
is before a fork. `application` serves gunicorn and uWSGI, `celery` is Celery's, and `place` serves scripts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.client import Message, TransactionProducer
from tests.support.shop import make_engine

TOPIC = "order.placed"

engine = make_engine(os.environ["SHOP_DATABASE"])
producer = TransactionProducer(os.environ["SHOP_SERVER"], group="shop", engine=engine)


def place(item: str) -> str:
    """Order an item and announce it; the process that did so."""
    with Session(engine) as session, session.begin():
        session.execute(sa.text("INSERT INTO orders (item) VALUES (:item)"), {"item": item})
        producer.send(session, Message(TOPIC, item))
    return str(os.getpid())


def application(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
    try:
        status, said = "200 OK", place(environ["QUERY_STRING"])
    except Exception as error:
        status, said = "500 Internal Server Error", f"{type(error).__name__}: {error}"
    start_response(status, [("content-type", "text/plain")])
    return [said.encode()]


if os.environ.get("SHOP_SENDS_AT_IMPORT"):
    place("at import")

if "SHOP_QUEUE" in os.environ:
    from celery import Celery

    queue = os.environ["SHOP_QUEUE"]
    celery = Celery("shop", broker="filesystem://")
    celery.conf.broker_transport_options = {
        "data_folder_in": queue,
        "data_folder_out": queue,
        "control_folder": queue,
    }
    order = celery.task(place, name="place", ignore_result=True)
