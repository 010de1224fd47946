"""A bridge's records in a segment, as few as show whether one is missing: a bridge writes one with each batch."""

from __future__ import annotations

from typing import Any

from notify.storage.log import meta

_TAG = meta.BridgeMoved.__struct_config__.tag


def thinned(records: list[list[Any]]) -> list[list[Any]]:
    """META records, [position, time, plain record], without those of bridges that go on where the one before ended.

    Of records that follow each other the first and the last stay; the last then says that it followed the first. So an
    audit finds the same gaps, between segments too.
    """
    kept: list[list[Any]] = []
    first: dict[str, list[Any]] = {}
    last: dict[str, list[Any]] = {}
    for each in records:
        _, _, record = each
        if not record or record[0] != _TAG:
            kept.append(each)
            continue
        state = record[1]
        source = state["source"]
        before = last.get(source) or first.get(source)
        if before is None:
            first[source] = each
            continue
        known = before[2][1]
        goes_on = state.get("since") == known["position"] and state.get("epoch", 0) == known.get("epoch", 0)
        if not goes_on:  # a gap, or another bridge: what was known of both sides stays as it is
            kept += [part[source] for part in (first, last) if source in part]
            first[source] = each
            last.pop(source, None)
        elif source in last:
            last[source] = [*each[:2], [_TAG, state | {"since": known.get("since")}]]
        else:
            last[source] = each
    return sorted([*kept, *first.values(), *last.values()], key=lambda each: int(each[0]))
