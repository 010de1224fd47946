"""Logs in stores: a directory's log, shipped whole."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

from notify.object_store.store import Store
from notify.spark.inputs.log_files import LocalFiles
from notify.spark.inputs.scan import SegmentScan
from notify.storage.log import LogStore
from notify.storage.log.format import segment_header
from notify.storage.log.segments import segment_name
from notify.storage.shipped import records
from notify.storage.shipped.manifest import Manifest
from notify.storage.shipped.shipper import Shipper


def sealed_copy(log: Path, to: Path) -> Path:
    """A copy of a log in `to`, as data directory, in which every segment that has messages is sealed."""
    shutil.copytree(log, to / "log")
    files = LocalFiles(to / "log")
    last = files.segments()[0][-1]
    facts = SegmentScan(files.disk(last), last.name).facts
    path = files.directory / last.name
    with path.open("r+b") as file:
        file.truncate(facts.end - last.base)
    (files.directory / segment_name(facts.end)).write_bytes(segment_header(facts.end, facts.last_us))

    async def open_once() -> None:
        store = LogStore(files.directory)
        await store.open(facts.last_us)  # makes the indexes that are missing
        await store.sealed_up()
        await store.close()

    asyncio.run(open_once())
    return to


def shipped(log: Path, to: Path) -> str:
    """Ship a log whole to a directory below `to`, with the administrators' records beside it; the store's URL."""
    url = f"file://{to}/store"
    data_dir = sealed_copy(log, to / "sealed")
    ship_directory(data_dir, url)
    if (log.parent / records.NAME).exists():
        records.copy_into(log.parent, data_dir / records.NAME)
        shipper = Shipper(Store(url), data_dir)
        shipper.begin()
        assert shipper.ship_records()
    return url


def ship_directory(data_dir: Path, url: str, **options: Any) -> Manifest:
    """Ship the sealed segments of a data directory that no server has open, all but the newest; the last manifest.
    `options`: those of Shipper."""
    shipper = Shipper(Store(url), data_dir, **options)
    shipper.begin()
    while shipper.ship_next() is not None:
        pass
    return shipper.manifest
