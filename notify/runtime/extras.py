"""The extras of the package, and the modules that each installs."""

from __future__ import annotations

EXTRA_OF = {
    "aiomysql": "asyncio",
    "aiosqlite": "asyncio",
    "alembic": "alembic",
    "common_expression_language": "server",
    "confluent_kafka": "kafka",
    "django": "django",
    "fastapi": "server",
    "fsspec": "store",
    "google_crc32c": "server",
    "greenlet": "asyncio",
    "jinja2": "server",
    "jwt": "server",
    "numpy": "server",
    "opentelemetry": "otel",
    "prometheus_client": "server",
    "psycopg": "postgresql",
    "pyarrow": "audit",
    "pymysql": "mysql",
    "pymysqlreplication": "bridge",
    "pyspark": "audit",
    "rich": "cli",
    "s3fs": "store",
    "starlette": "server",
    "structlog": "server",
    "typer": "cli",
    "uvicorn": "server",
    "uvloop": "server",
}
"""For each optional module, the smallest extra that installs it."""


def remedy(error: ImportError) -> str | None:
    """A sentence that names the extra for a missing module; None if no extra installs the module."""
    module = (error.name or "").partition(".")[0]
    extra = EXTRA_OF.get(module)
    if extra is None:
        return None
    return f"the module {module} is not installed, which the extra {extra} brings: pip install 'notify-tx[{extra}]'"
