"""The service's own tables."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "orders",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("item", sa.String, nullable=False),
        sa.Column("customer", sa.Integer, nullable=False),
    )
    op.create_table(
        "points",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("customer", sa.Integer, nullable=False, index=True),
        sa.Column("points", sa.Integer, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("points")
    op.drop_table("orders")
