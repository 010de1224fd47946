"""Identities of an audit's inputs, which stay the same under whatever names flags give them."""

from __future__ import annotations

from collections.abc import Mapping

from notify.spark.inputs.shards import shard_of
from notify.spark.result import Inputs


def identities_of(inputs: Inputs) -> dict[str, str]:
    """The inputs by their identities, with their names: a database's is its source id, if it has one."""
    known = {f"database {each.source_id() or each.name}": f"database {each.name}" for each in inputs.databases}
    for each in inputs.storages:
        shard = shard_of(each)
        known[f"storage {shard.source if shard else each.name}"] = f"storage {each.name}"
    known |= {f"log {each.name}": f"log {each.name}" for each in inputs.logs}
    return known | {f"kafka {each.cluster_id()}": each.name for each in inputs.kafka}


def lasting(identities: Mapping[str, str]) -> dict[str, str]:
    """Those that stay the same under any name: not those of logs, nor of databases without a source id."""
    return {identity: name for identity, name in identities.items() if identity != name}
