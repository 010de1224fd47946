"""The names of a store's objects. Each object is written once; only the manifest is replaced.

| name | holds |
|---|---|
| `manifest.json` | what was shipped (manifest.py) |
| `pages/{base}-{end}-{generation}.json` | segments that are no longer in the manifest itself |
| `segments/{base}-{generation}.log` | a segment's bytes |
| `segments/{base}-{generation}.idx` | its sealed index |
| `segments/{position}-{generation}.ckpt` | the checkpoint at its end |
| `records/{time}-{generation}.db` | the administrators' records, an SQLite database |
| `messages/{base}-{generation}.parquet` | its messages as a table (table.py) |

Positions have 20 digits and generations 6, so that names sort as numbers do.
"""

from __future__ import annotations

import re

MANIFEST = "manifest.json"
_LOG = re.compile(r"segments/(\d{20})-(\d{6})\.log")


def log_name(base: int, generation: int) -> str:
    return f"segments/{base:020d}-{generation:06d}.log"


def log_of(name: str) -> tuple[int, int] | None:
    """Base and generation of a segment's object; None for any other object."""
    match = _LOG.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def index_name(base: int, generation: int) -> str:
    return f"segments/{base:020d}-{generation:06d}.idx"


def checkpoint_name(position: int, generation: int) -> str:
    return f"segments/{position:020d}-{generation:06d}.ckpt"


def parquet_name(base: int, generation: int) -> str:
    return f"messages/{base:020d}-{generation:06d}.parquet"


def records_name(at_us: int, generation: int) -> str:
    return f"records/{at_us:020d}-{generation:06d}.db"


def page_name(base: int, end: int, generation: int) -> str:
    return f"pages/{base:020d}-{end:020d}-{generation:06d}.json"
