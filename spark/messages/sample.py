"""The type of a query's JSON bodies, inferred from the newest messages of its topics."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

from notify.errors import InvalidRequest
from notify.spark.messages.infer import fields_of
from notify.spark.messages.options import Options
from notify.spark.messages.planning import Planning
from notify.spark.messages.reading import Reading


def inferred(options: Options) -> str:
    """The fields of the bodies, as DDL. Raises InvalidRequest where no body is a JSON object."""
    bodies: list[bytes] = []
    with closing(Planning(options)) as planning:
        end = planning.latest()
        queues = sum(len(each.next) for each in end.values())
        most = max(1, options.infer_rows // max(1, queues))
        start = {
            topic: replace(each, next={queue: max(0, at - most) for queue, at in each.next.items()})
            for topic, each in end.items()
        }
        pieces = planning.pieces(start, end)
    with Reading(replace(options, fails_on_loss=False)) as reading:
        for piece in pieces:
            for batch in reading.rows(piece):
                bodies += batch.column("body").to_pylist()
    fields = fields_of(body for body in bodies if body is not None)
    if not fields:
        raise InvalidRequest(
            f"option schema: none of the newest {len(bodies)} messages of {', '.join(options.topics)} is a JSON "
            'object, so that no type can be inferred: give it as DDL, such as "item string, amount double"'
        )
    return fields
