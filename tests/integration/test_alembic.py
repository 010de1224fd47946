"""The Alembic helper makes the same tables as `create_tables`, and autogenerate leaves them alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations

from notify.check.question import read_source
from notify.client import Message, TransactionProducer
from notify.client import alembic as helper
from notify.client.tables.definitions import metadata
from notify.testing.process import ServerProcess
from tests.support.groups import bodies, drain, subscribe
from tests.support.shop import Base, make_engine


@pytest.fixture
def migrated(engine_url: str) -> Iterator[sa.Engine]:
    """The engine of a database with the service's own tables, upgraded by the helper."""
    engine = make_engine(engine_url)
    Base.metadata.create_all(engine)
    with engine.begin() as connection, Operations.context(MigrationContext.configure(connection)):
        helper.upgrade()
    yield engine
    engine.dispose()


def test_tables_made_by_alembic_carry_messages(migrated: sa.Engine, server: ServerProcess, unique: str) -> None:
    subscribe(server.url, unique, unique)
    with TransactionProducer(server.url, group=unique, engine=migrated) as producer:
        with sa.orm.Session(migrated) as session, session.begin():
            producer.send(session, Message(unique, "x"))
    assert bodies(drain(server.url, unique, unique, 1)) == ["x"]
    with migrated.connect() as connection:
        assert read_source(connection)[0]


def test_autogenerate_leaves_it_alone(migrated: sa.Engine) -> None:
    with migrated.connect() as connection:
        options = {"include_object": helper.include_object}
        ours_left_out = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(ours_left_out, Base.metadata) == []
        without = compare_metadata(MigrationContext.configure(connection), Base.metadata)
        assert {change[1].name for change in without if change[0] == "remove_table"} == set(metadata.tables)


def test_downgrade_takes_the_tables_away(migrated: sa.Engine) -> None:
    with migrated.begin() as connection, Operations.context(MigrationContext.configure(connection)):
        helper.downgrade()
    with migrated.connect() as connection:
        assert sa.inspect(connection).get_table_names() == ["orders"]
