"""Alembic's environment. Autogenerate leaves Notify's tables alone."""

import sqlalchemy as sa
from alembic import context
from shop import settings
from shop.models import Base

from notify.client.alembic import include_object

engine = sa.create_engine(settings.DATABASE)
with engine.connect() as connection:
    context.configure(connection, target_metadata=Base.metadata, include_object=include_object)
    with context.begin_transaction():
        context.run_migrations()
engine.dispose()
