"""The use of each extra, as code that runs where nothing else is installed."""

from __future__ import annotations

import tomllib
from pathlib import Path

NOT_RELEASED = {"dev"}


def names(pyproject: Path) -> list[str]:
    """The extras that users install."""
    project = tomllib.loads(pyproject.read_text())["project"]
    return [name for name in project["optional-dependencies"] if name not in NOT_RELEASED]


USES = {
    "": "import notify.check, notify.errors\n"
    "from notify.client import Consumer, Inbox, Message, Reader, TransactionProducer, create_tables\n"
    "import sqlalchemy\n"
    "create_tables(sqlalchemy.create_engine('sqlite://'))\n"
    "try:\n    import fastapi\nexcept ImportError:\n    pass\nelse:\n    raise SystemExit('the SDK brings FastAPI')",
    "postgresql": "import sqlalchemy\nsqlalchemy.create_engine('postgresql+psycopg://localhost/x')",
    "mysql": "import cryptography, sqlalchemy\nsqlalchemy.create_engine('mysql+pymysql://localhost/x')",
    "sql": "import alembic, notify.storage.sql.schema, notify.storage.sql.tables",
    "bridge": "import notify.binlog_bridge.bridge",
    "kafka": "import notify.movers.sinks.kafka, notify.client.kafka.plan",
    "filters": "from notify.protocol.filter import Filter\nFilter('tag == \"vip\"')",
    "otel": "from notify.runtime import tracing\ntracing.export_from_environment()",
    "asyncio": "from sqlalchemy.ext.asyncio import create_async_engine\nimport greenlet\n"
    "create_async_engine('sqlite+aiosqlite://')",
    "alembic": "from notify.client.alembic import downgrade, upgrade",
    "django": "from django.conf import settings\nsettings.configure()\nimport django\ndjango.setup()\n"
    "import notify.client.django",
    "cli": "import sys\nfrom notify.cli import main\nsys.argv = ['notify', '--version']\nmain.main()",
    "server": "from notify.testing import InMemoryServer\nwith InMemoryServer() as server:\n    assert server.url",
    "store": "import s3fs\nfrom notify.object_store.store import Store\nStore('memory://x')",
    "zstd": "from notify.client.bodies.zstd import compressed, decompressed\n"
    "assert decompressed(compressed(b'x'), 1) == b'x'",
    "ship": "import fsspec, pyarrow, s3fs, notify.object_store.store, notify.storage.shipped.table",
    "audit": "import pyspark, notify.spark.audit, notify.spark.messages.source",
    "connect": "import pyspark.sql.connect.session, notify.spark.session",
}
"""For each extra, a use of what it brings."""

SERVES = """
import sys, tempfile
from notify.client import Message, TransactionProducer
from notify.testing import ServerProcess

server = ServerProcess(__import__("pathlib").Path(tempfile.mkdtemp()) / "data").start()
try:
    with TransactionProducer(server.url, group="release") as producer:
        producer.publish(Message("release", "tried"))
finally:
    server.stop()
"""
