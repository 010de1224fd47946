"""Files of a table by its manifest."""

from __future__ import annotations

import io
import time

import pyarrow as pa
import pyarrow.parquet as pq

from notify.errors import InvalidRequest
from notify.object_store.store import Store
from notify.spark.inputs.stored_file import opened
from notify.spark.tables import manifest as manifests
from notify.spark.tables.manifest import File

TIDY_AFTER_SECONDS = 86_400.0


def read_file(store: Store, file: File) -> pa.Table:
    """The rows of one file. Raises ObjectStoreFailed if its bytes are damaged."""
    return pq.read_table(io.BytesIO(store.read_listed(file.name, (file.size, file.sha256), file.size)))


def files_of(url: str, table: str = "") -> list[File]:
    """The files of a table, the oldest first. Raises InvalidRequest for one without rows, ObjectStoreFailed."""
    store = Store(url)
    files = [file for file in manifests.files_of(store, manifests.load(store)) if file.table == table]
    if not files:
        raise InvalidRequest(f"{url}: there is no table{f' {table!r}' if table else ''} with rows: name another URL")
    return files


def schema_of(url: str, files: list[File]) -> pa.Schema:
    """The columns of the newest file."""
    return pq.ParquetFile(opened(Store(url), files[-1].name, files[-1].size)).schema_arrow


def urls_of(url: str, table: str = "") -> list[str]:
    """The URLs of a table's files, for anything that reads Parquet. Raises as `files_of`."""
    return [f"{url.rstrip('/')}/{file.name}" for file in files_of(url, table)]


def tidy(url: str, older_than_seconds: float = TIDY_AFTER_SECONDS) -> list[str]:
    """Delete unlisted files, which killed writers left. Returns their names.

    `older_than_seconds`: a writer that is still at work needs its younger ones. Raises ObjectStoreFailed.
    """
    store = Store(url)
    until = f"data/{int((time.time() - older_than_seconds) * 1e6):016d}"
    unlisted = [name for name in store.names("data") if name < until]  # before the manifest: it may list more by then
    listed = {file.name for file in manifests.files_of(store, manifests.load(store))}
    deleted = [name for name in unlisted if name not in listed]
    for name in deleted:
        store.delete(name)
    return deleted
