"""The schemas of the data routes, for JSON and msgpack, and the canonical encoding of a message in storage.

The two formats differ in one field: a body is text in JSON and bytes in msgpack; `body_base64` works in both.
notify/protocol/limits.py checks bounds and names, which these types cannot express.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import lru_cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct


class Fields(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The base of requests: an unknown field is refused."""


# --- messages -------------------------------------------------------------------------------------------------


class MessageFields(Fields):
    topic: str
    body_base64: str | None = None
    key: str | None = None
    tag: str | None = None
    headers: dict[str, str] | None = None
    delay: float | None = None
    deliver_at: datetime | None = None
    ttl: float | None = None


class JsonMessage(MessageFields):
    body: str | None = None


class PackedMessage(MessageFields):
    body: bytes | None = None


class JsonPublished(JsonMessage):
    id: str | None = None


class PackedPublished(PackedMessage):
    id: str | None = None


class Payload(Struct, omit_defaults=True):
    """A message as storage keeps it and deliveries send it; its msgpack form is canonical."""

    topic: str
    body: bytes
    key: str | None = None
    tag: str | None = None
    headers: dict[str, str] | None = None
    ttl: float | None = None


# --- transactions ---------------------------------------------------------------------------------------------

NO_DATABASE = "none"
"""The source of halves whose transactions are in no database: no local row tells their outcome, only a listener. Other
sources are ids of databases."""


class TransactionFields(Fields):
    id: str
    check_after: float | None = None
    committed: bool = False


class JsonTransaction(TransactionFields, kw_only=True):
    messages: list[JsonMessage]


class PackedTransaction(TransactionFields, kw_only=True):
    messages: list[PackedMessage]


class OutcomeItem(Fields):
    id: str
    outcome: str
    shard: str | None = None
    check: str | None = None
    unavailable: bool = False
    reason: str | None = None


class TransactionsFields(Fields):
    producer_group: str
    source: str | None = None
    instance: str | None = None
    outcomes: list[OutcomeItem] = []
    """Outcomes of other transactions, recorded as by their own route, with one request and one wait for the disk."""


class JsonTransactions(TransactionsFields, kw_only=True):
    transactions: list[JsonTransaction]


class PackedTransactions(TransactionsFields, kw_only=True):
    transactions: list[PackedTransaction]


class Outcomes(Fields):
    producer_group: str
    outcomes: list[OutcomeItem]


class States(Fields):
    producer_group: str
    ids: list[str]


class Poll(Fields):
    producer_group: str
    instance: str
    sources: list[str] | None = None
    topics: list[str] | None = None
    wait: float = 0
    max: int = 100


class JsonMessages(Fields):
    messages: list[JsonPublished]
    anywhere: bool = False


class PackedMessages(Fields):
    messages: list[PackedPublished]
    anywhere: bool = False
    """Whether this worker stores keys of other workers too: a relay sends all to one worker to keep its order."""


class ScheduleFields(Fields):
    """When a schedule's messages are sent: by a cron expression in a zone, or at an interval."""

    cron: str | None = None
    every: float | None = None
    zone: str = "UTC"
    catch_up: str = "last"
    catch_up_most: int = 100


class JsonSchedule(ScheduleFields, kw_only=True):
    message: JsonMessage


class PackedSchedule(ScheduleFields, kw_only=True):
    message: PackedMessage


class ScheduleDeclared(Struct):
    """The answer to a declaration: what became of the schedule, and its next instants."""

    name: str
    changed: bool
    next: list[datetime]


class ScheduleDeleted(Struct):
    """The answer to a deletion: whether there was such a schedule."""

    name: str
    deleted: bool


# --- bridges --------------------------------------------------------------------------------------------------


class BridgedTransaction(Fields):
    """A committed transaction that a bridge has read."""

    id: str
    producer_group: str
    messages: list[PackedMessage]


class JsonBridgedTransaction(Fields):
    id: str
    producer_group: str
    messages: list[JsonMessage]


class BridgeBatch(Fields):
    """A batch of a bridge, without its transactions, which differ between the formats. Positions are opaque texts of
    the bridge; empty: the beginning."""

    epoch: int
    expected_position: str
    position: str
    claim: bool = False
    prepare: bool = False
    """Whether this is a part of a large transaction, invisible until a later batch names its ids in `commit`."""
    commit: list[str] = []
    rollback: list[str] = []
    """Ids of earlier parts whose transaction was rolled back in the source."""
    refuse_whole: bool = False
    """Whether nothing is stored if a transaction is refused finally: the bridge notes it first, then sends the rest."""
    lag: float | None = None
    """Seconds since the newest commit of this batch in the database."""
    note: str | None = None
    """The bridge's report about itself, shown in the list of bridges."""
    retained: int | None = None
    """The bytes of its log that the database keeps for this bridge, if it keeps any for a reader."""
    retained_left: int | None = None
    """How many more may be written before the database gives the bridge up, if there is a bound."""
    slot_age: int | None = None
    """How many transactions old the oldest is whose catalogue rows a PostgreSQL keeps for this bridge."""
    base: str | None = None
    """The text that this position and later ones refer to, see notify/movers/long_positions.py; None: it stays as it
    is."""


class JsonBridgeBatch(BridgeBatch):
    transactions: list[JsonBridgedTransaction] = []


class PackedBridgeBatch(BridgeBatch):
    transactions: list[BridgedTransaction] = []


class Bridged(Struct, omit_defaults=True):
    """The result of a bridge's batch."""

    position: str
    epoch: int
    stored: int = 0
    known: int = 0
    """The number of transactions that the log had already."""
    refused: list[Item] = []
    """The transactions that are refused finally. With `refuse_whole` nothing is stored then, and `position` stays."""


class RefusedTransaction(Fields):
    """A transaction on a source's list of refused messages, with the target's reason."""

    id: str
    topic: str
    code: str
    detail: str


class RefusedReport(Fields):
    """How many of a source's refused transactions wait for a decision, and the first of them."""

    waiting: int
    transactions: list[RefusedTransaction] = []


class LeftBehindReport(Fields):
    """How many transactions a producer group in mode auto has left behind in a database, and the seconds since the
    oldest."""

    producer_group: str
    source: str
    transactions: int
    seconds: float = 0.0


# --- consumers ------------------------------------------------------------------------------------------------


class Subscribe(Fields):
    """A group's subscription to a topic; times are in seconds. `start` counts only for a new subscription."""

    mode: str = "shared"
    start: str | int | None = None
    tags: list[str] = []
    filter: str = ""
    max_attempts: int = 16
    retry_min: float = 1.0
    retry_max: float = 300.0
    force: bool = False
    max_deaths: int = 16
    on_exhausted: str = "dead_letter"
    fair_by: str = ""


class WholeInbox(Fields):
    """The time since which a group's inbox has a row for each message that took effect."""

    whole_from: Annotated[datetime, Meta(tz=True)]


class Receive(Fields):
    instance: str
    topics: list[str] | None = None
    max: int = 100
    wait: float = 0
    lease: float = 30


class SettleItem(Fields):
    receipt: str
    action: str
    delay: float | None = None
    lease: float | None = None
    reason: str | None = None
    trace: str | None = None
    """The traceback of a failed attempt, for people; the server keeps it in memory only."""


class Settle(Fields):
    items: list[SettleItem]


class Leave(Fields):
    instance: str


# --- answers --------------------------------------------------------------------------------------------------


class Item(Struct, omit_defaults=True, gc=False):
    """The result of one item of a batch; `status`: the HTTP status that a request with only this item would get."""

    id: str
    status: int
    state: str | None = None
    shard: str | None = None
    flush: str | None = None
    code: str | None = None
    detail: str | None = None
    retry_after: float | None = None


class Items(Struct, omit_defaults=True):
    items: list[Item]
    outcomes: list[Item] = []
    """The results of the outcomes in a request with halves."""


class WithdrawalState(Struct, omit_defaults=True):
    """The fate of a message that withdraws another one: WITHDRAWN, TOO_LATE, NOT_FOUND, WAITING or ALREADY; or, as
    its own transaction is, UNDECIDED or ROLLED_BACK."""

    id: str
    withdraws: str
    topic: str
    outcome: str
    replaces: bool = False


class SettledItem(Struct, omit_defaults=True, gc=False):
    receipt: str
    status: int
    code: str | None = None
    detail: str | None = None


class SettledItems(Struct):
    items: list[SettledItem]


class DeliveryHead(Struct, gc=False):
    """A delivery without the message itself."""

    receipt: str
    id: str
    queue: int
    offset: int
    attempt: int
    committed_at: str


class ReplayedHead(DeliveryHead, gc=False):
    """The head of a delivery that repeats effects. An older SDK ignores the field `replay`."""

    replay: int


class Delivered(Struct, omit_defaults=True, kw_only=True, gc=False):
    """A delivery in the SDK's format (msgpack)."""

    receipt: str = ""
    id: str
    topic: str
    queue: int
    offset: int
    attempt: int = 1
    committed_at: str
    body: bytes
    key: str | None = None
    tag: str | None = None
    headers: dict[str, str] | None = None
    replay: int = 0


class DeliveredRun(Struct, omit_defaults=True, kw_only=True):
    """Deliveries of one lease, and so of one queue, that were encoded together (msgpack); client/consumer/reply.py
    makes messages of them."""

    lease: str
    """The receipt of the message at place n is `{lease}.{n}`."""
    attempts: list[int] | None = None
    """The attempt of each message; None: the first one of each."""
    replay: int = 0
    queue: int
    offsets: list[tuple[int, int]]
    """Runs of offsets: (first, count)."""
    heads: bytes
    """A RUN_HEAD for each message."""
    messages: list[Payload]


class Received(Struct):
    """The answer to a request to receive (msgpack)."""

    messages: list[Delivered]
    runs: list[DeliveredRun] = []
    """Sent in place of `messages` to a client that asks for runs."""


class Pulled(Struct):
    """The answer to a read of a queue (msgpack)."""

    messages: list[Delivered]
    next_offset: int
    topic_number: int = 0
    """Another one once the topic is deleted and made again, which begins its offsets at 0; 0: an older server's."""


class CheckedMessage(Struct, omit_defaults=True):
    topic: str
    body: bytes = b""
    key: str | None = None
    tag: str | None = None
    headers: dict[str, str] | None = None


class Check(Struct):
    """A check in the SDK's format (msgpack)."""

    token: str
    shard: str
    id: str
    source: str
    attempt: int
    messages: list[CheckedMessage]


class Checks(Struct):
    checks: list[Check]


class Problem(Struct, omit_defaults=True):
    """An error in the format of RFC 9457."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    retryable: bool = False
    retry_after: float | None = None


MSGPACK, JSON, PROBLEM = "application/msgpack", "application/json", "application/problem+json"
PROBLEM_TYPE = "urn:notify:error:"
"""The beginning of the `type` of a server's problems, with which it shows that an error is its own word."""

RUN_HEAD = struct.Struct(">16sHQ")
"""The head of a message in a run, stored apart from its payload: its transaction's id, its number there, and when it
was committed (microseconds since 1970)."""

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The errors of msgspec for bytes from elsewhere. For texts that are not UTF-8, and for deep nesting, it raises
Python's."""

encode_msgpack = msgspec.msgpack.Encoder().encode
encode_json = msgspec.json.Encoder().encode
decode_payload = msgspec.msgpack.Decoder(Payload).decode


def instant(time_us: int) -> str:
    """Microseconds since 1970 as RFC 3339 in UTC."""
    seconds, rest = divmod(time_us, 1_000_000)
    return f"{_to_the_second(seconds)}.{rest:06d}Z"


def instants(times_us: Iterable[int]) -> list[str]:
    """`instant` of each of many times, without a call for each: neighbours mostly have their second in common."""
    texts: list[str] = []
    last, to_the_second = -1, ""
    for time_us in times_us:
        second = time_us // 1_000_000
        if second != last:
            last, to_the_second = second, _to_the_second(second)
        texts.append(f"{to_the_second}.{time_us - second * 1_000_000:06d}Z")
    return texts


@lru_cache(64)
def _to_the_second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def microseconds(moment: datetime) -> int:
    """An aware instant as microseconds since 1970. Raises ValueError if it names no time zone."""
    if moment.tzinfo is None:
        raise ValueError("an instant needs its time zone, for example 2026-01-31T12:00:00Z")
    return round(moment.timestamp() * 1_000_000)


def array_head(count: int) -> bytes:
    """The head of an array of `count` elements, in msgpack."""
    if count < 16:
        return bytes((0x90 | count,))
    return struct.pack(">BH", 0xDC, count) if count < 65536 else struct.pack(">BI", 0xDD, count)


def body_fields(body: bytes) -> dict[str, Any]:
    """A body for a JSON answer: text if it is valid UTF-8, else base64."""
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}
