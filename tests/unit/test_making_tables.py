"""create_tables leaves what is there."""

from __future__ import annotations

import sqlalchemy as sa

from notify.client.tables.creation import create_tables


def test_a_view_in_the_place_of_a_table_stays() -> None:
    engine = sa.create_engine("sqlite://")
    source = create_tables(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE notify_refused RENAME TO elsewhere")
        connection.exec_driver_sql("CREATE VIEW notify_refused AS SELECT * FROM elsewhere")
    assert create_tables(engine) == source
    engine.dispose()
