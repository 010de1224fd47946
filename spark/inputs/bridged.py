"""Thins out the records of bridges in a segment: a bridge writes one with each batch, and few of them show a gap."""

from __future__ import annotations

from typing import Any

from notify.storage.log import meta

_TAG = meta.BridgeMoved.__struct_config__.tag


def thinned(records: list[list[Any]]) -> list[list[Any]]:
    """META records, [position, time, plain record], with fewer records of bridges.

    In a run of records without a gap the first and the last stay, and the last then says that it follows the first. An
    audit therefore finds the same gaps, also between segments.
    """
    thin: list[list[Any]] = []
    first: dict[str, list[Any]] = {}
    last: dict[str, list[Any]] = {}
    for each in records:
        _, _, record = each
        if not record or record[0] != _TAG:
            thin.append(each)
            continue
        state = record[1]
        source = state["source"]
        before = last.get(source) or first.get(source)
        if before is None:
            first[source] = each
            continue
        previous = before[2][1]
        continues = state.get("since") == previous["position"] and state.get("epoch", 0) == previous.get("epoch", 0)
        if not continues:  # a gap, or another bridge: the records on both sides of it stay as they are
            thin += [part[source] for part in (first, last) if source in part]
            first[source] = each
            last.pop(source, None)
        elif source in last:
            last[source] = [*each[:2], [_TAG, state | {"since": previous.get("since")}]]
        else:
            last[source] = each
    return sorted([*thin, *first.values(), *last.values()], key=lambda each: int(each[0]))
