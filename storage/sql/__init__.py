"""Transactions in a database: any number of stateless servers share it.

Nothing is imported here: the registry and the tables need SQLAlchemy only, the store Alembic as well.
"""
