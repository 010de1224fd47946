"""`transactional` refuses at once a function that it cannot run within a transaction."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from notify.client import AsyncTransactionProducer, TransactionProducer
from notify.errors import InvalidRequest
from tests.support.callables import Awaited, async_generator, coroutine, generator, plain, wrapping_a_coroutine

URL = "http://127.0.0.1:9"


@pytest.fixture
def producer() -> Iterator[TransactionProducer]:
    with TransactionProducer(URL, group="g") as made:
        yield made


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (coroutine, "use AsyncTransactionProducer"),
        (functools.partial(coroutine), "use AsyncTransactionProducer"),
        (Awaited(), "use AsyncTransactionProducer"),
        (generator, "has a `yield`"),
        (async_generator, "has a `yield`"),
        ("place_order", "is not a function"),
    ],
)
def test_the_producer_for_threads_refuses(producer: TransactionProducer, function: Any, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        producer.transactional(Session)(function)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (plain, "is a plain function"),
        (functools.partial(plain), "is a plain function"),
        (generator, "has a `yield`"),
        (async_generator, "has a `yield`"),
        (None, "is not a function"),
    ],
)
def test_the_producer_for_asyncio_refuses(function: Any, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        AsyncTransactionProducer(URL, group="g").transactional(Session)(function)


@pytest.mark.parametrize("function", [coroutine, functools.partial(coroutine), wrapping_a_coroutine])
def test_the_producer_for_asyncio_takes_what_it_can_await(function: Any) -> None:
    assert callable(AsyncTransactionProducer(URL, group="g").transactional(Session)(function))


@pytest.mark.parametrize("give", [coroutine, lambda session: coroutine(session)])
def test_a_function_that_only_calls_a_coroutine_function_commits_nothing(
    producer: TransactionProducer, give: Callable[[Any], Any]
) -> None:
    engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE orders (id INTEGER)")

    @producer.transactional(sessionmaker(engine))
    def place(session: Session) -> Any:
        session.execute(sa.text("INSERT INTO orders VALUES (1)"))
        return give(session)

    with pytest.raises(InvalidRequest, match="returned a coroutine"):
        place()
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM orders").scalar() == 0
    engine.dispose()


def test_a_transactional_function_returns_its_result(producer: TransactionProducer) -> None:
    engine = sa.create_engine("sqlite://")
    assert producer.transactional(sessionmaker(engine))(plain)() == "done"
    engine.dispose()
