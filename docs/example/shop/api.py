"""The application: `uvicorn shop.api:app`."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import sqlalchemy as sa
from fastapi import Depends, FastAPI
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from notify.client import AsyncTransactionProducer, Message
from shop import settings
from shop.models import Order, Points

engine = create_async_engine(settings.DATABASE)
producer = AsyncTransactionProducer(settings.NOTIFY, group="shop", engine=engine)


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
    await producer.start()  # from now on it answers what became of transactions that a crash left in doubt
    yield
    await producer.close()
    await engine.dispose()


app = FastAPI(lifespan=lifespan)


async def session() -> AsyncIterator[AsyncSession]:
    async with AsyncSession(engine) as made, made.begin():
        yield made


# With the scope `function` the commit comes before the response: a client whose order was refused is told so.
InTransaction = Annotated[AsyncSession, Depends(session, scope="function")]


@app.post("/orders")
async def place(item: str, customer: int, session: InTransaction) -> dict[str, str]:
    order = Order(item=item, customer=customer)
    session.add(order)
    body = {"item": item, "customer": customer}
    # Messages of one customer keep their order; the order's id is known at the commit.
    await producer.send(session, Message("order.placed", body, key=str(customer), headers={"source": "shop"}))
    return {"ordered": item}


@app.get("/points/{customer}")
async def points(customer: int, session: InTransaction) -> dict[str, int]:
    total = await session.scalar(sa.select(sa.func.sum(Points.points)).where(Points.customer == customer))
    return {"points": total or 0}
