"""Reports of bridges and relays about refused messages of their sources: the compacted topic `notify-refused`.

A record's key is the source, its value the report as JSON (notify/protocol/wire.py). Servers that show groups read the
reports.
"""

from __future__ import annotations

from notify.kafka.table import KafkaTable
from notify.protocol.wire import RefusedReport

REFUSED: KafkaTable[str, RefusedReport] = KafkaTable.of_json("notify-refused", RefusedReport)
"""The last report of each source."""
