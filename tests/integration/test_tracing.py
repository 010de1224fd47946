"""One trace: from the request that placed the order, through a crash and a check, to the consumer's effect."""

from __future__ import annotations

import asyncio

import pytest
import sqlalchemy as sa
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from sqlalchemy.orm import Session

from notify.binlog_bridge.bridge import Bridge
from notify.client import Consumer, Inbox, Message, TransactionProducer, create_tables
from notify.protocol.message import ReceivedMessage
from notify.runtime import tracing
from notify.server.latency import LOOK_US
from notify.testing import Crashed, InMemoryServer, crashing
from tests.support.clock import eventually
from tests.support.groups import Caller, running, subscribe
from tests.support.http import ask, call, post
from tests.support.shop import Order, make_engine
from tests.support.transactions import half_request, new_id


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    """The exporter of the process's tracer provider, which cannot be replaced; emptied for each test."""
    provider = TracerProvider()
    spans = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)
    return spans


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> InMemorySpanExporter:
    exporter.clear()
    return exporter


def by_name(spans: InMemorySpanExporter, name: str) -> ReadableSpan:
    return next(s for s in spans.get_finished_spans() if s.name == name)


def test_one_trace_through_a_crash_and_a_check(spans: InMemorySpanExporter, sqlite_engine: sa.Engine) -> None:
    engine = sqlite_engine
    tracer = trace.get_tracer("shop")
    with InMemoryServer(tracing=True) as server:
        consumer = Consumer(server.url, group="points", inbox=Inbox(engine))

        @consumer.subscribe("order.placed", start="earliest")
        def handle(message: ReceivedMessage, session: Session) -> None:
            with tracer.start_as_current_span("INSERT points"):
                session.add(Order(item=message.text))
                session.flush()

        with TransactionProducer(server.url, group="orders", engine=engine, check_after=600) as producer:
            with tracer.start_as_current_span("POST /orders") as root, crashing("after_local_commit"):
                with pytest.raises(Crashed), Session(engine) as session, session.begin():
                    producer.send(session, Message("order.placed", "book"))
            server.advance(601)
            server.wait_until_decided()
            with running(consumer):
                eventually(
                    lambda: any(s.name == "INSERT points" for s in spans.get_finished_spans()), "the effect's span"
                )
    steps = ["POST /orders", "send order.placed", "half order.placed", "ask order.placed", "check order.placed",
             "deliver order.placed", "process order.placed", "INSERT points"]  # fmt: skip
    by_name = {s.name: s for s in spans.get_finished_spans()}
    assert by_name.keys() >= set(steps)
    trace_id = root.get_span_context().trace_id
    assert {by_name[name].context.trace_id for name in steps} == {trace_id}
    send = by_name["send order.placed"].context.span_id
    for name in ("half", "ask", "check", "deliver", "process"):
        parent = by_name[f"{name} order.placed"].parent
        assert parent is not None and parent.span_id == send, name
    effect = by_name["INSERT points"].parent
    assert effect is not None and effect.span_id == by_name["process order.placed"].context.span_id
    attributes = by_name["process order.placed"].attributes or {}
    assert attributes["messaging.consumer.group.name"] == "points" and attributes["messaging.system"] == "notify"
    assert (by_name["check order.placed"].attributes or {})["notify.outcome"] == "COMMIT"


@pytest.mark.long
def test_a_bridge_goes_on_with_the_trace(spans: InMemorySpanExporter, binlog_url: str) -> None:
    """A trace goes from the request through the outbox's row and the binlog into the queue."""
    with InMemoryServer(tracing=True) as server:
        engine = make_engine(binlog_url)
        create_tables(engine)
        with (
            TransactionProducer("http://127.0.0.1:9", group="orders", engine=engine, mode="outbox") as producer,
            trace.get_tracer("shop").start_as_current_span("POST /orders") as root,
            Session(engine) as session,
            session.begin(),
        ):
            producer.send(session, Message("order.placed", "book"))
        asyncio.run(Bridge([binlog_url], server.url).run(once=True))
        assert [m.text for m in server.wait_for("order.placed", 1)] == ["book"]
        engine.dispose()
    append, send = by_name(spans, "append order.placed"), by_name(spans, "send order.placed")
    assert append.context.trace_id == root.get_span_context().trace_id
    assert append.parent is not None and append.parent.span_id == send.context.span_id
    assert str((append.attributes or {})["messaging.notify.source"])


def test_headers_of_others_and_nonsense(spans: InMemorySpanExporter) -> None:
    sampled = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    assert tracing.parse({"traceparent": sampled}) is not None
    for wrong in ("", "x", sampled[:-1], sampled[:-1] + "0", sampled.replace("a", "0"), sampled.replace("a", "g")):
        assert tracing.parse({"traceparent": wrong}) is None
    with InMemoryServer(tracing=True) as server, TransactionProducer(server.url, group="p") as producer:
        producer.publish(Message("t", "x", headers={"traceparent": "nonsense", "mine": "stays"}))
        producer.publish(Message("t", "x", headers={"traceparent": sampled}))
        assert len(server.wait_for("t", 2)) == 2
    assert by_name(spans, "send t") is not None


def test_without_a_trace_nothing_is_added(spans: InMemorySpanExporter) -> None:
    """Without a sampled trace a message is sent as it is."""
    context = trace.SpanContext(1, 2, is_remote=True, trace_flags=trace.TraceFlags(0))
    with trace.use_span(trace.NonRecordingSpan(context)):
        with InMemoryServer() as server, TransactionProducer(server.url, group="p") as producer:
            producer.publish(Message("t", "x"))
            (message,) = server.wait_for("t", 1)
    assert message.text == "x" and spans.get_finished_spans() == ()


def test_a_batch_has_a_span_with_links_to_its_messages(spans: InMemorySpanExporter) -> None:
    """Each message was sent in a trace of its own, or in none."""
    sent = [f"00-{n:032x}-{n:016x}-01" for n in (1, 2)]
    messages = [
        ReceivedMessage(str(n), "t", 0, n, b"", None, None, {tracing.HEADER: text} if text else {}, 1, "")
        for n, text in enumerate([*sent, None])
    ]
    with tracing.processing_batch("g", messages):
        pass
    with tracing.processing_batch("g", messages[2:]):
        pass
    (span,) = spans.get_finished_spans()
    assert span.name == "process t" and span.kind is trace.SpanKind.CONSUMER
    assert [link.context.trace_id for link in span.links] == [1, 2]
    assert dict(span.attributes or {})["messaging.batch.message_count"] == 3


PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,application/openmetrics-text;version=0.0.1;"
    "q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)
"""The header `Accept` of Prometheus 3."""


def exemplars(url: str) -> dict[tuple[str, str], list[str]]:
    """The traces of the exemplars in OpenMetrics by histogram and label; each lies in its bucket, and is recent."""
    status, text = ask(url, "GET", "/metrics", headers={"accept": PROMETHEUS})
    assert status == 200 and text.endswith("# EOF\n")
    found: dict[tuple[str, str], list[str]] = {}
    for family in text_string_to_metric_families(text):
        least = 0.0
        for sample in family.samples:
            if sample.exemplar is not None:
                (label,) = (value for name, value in sample.labels.items() if name != "le")
                assert least < sample.exemplar.value <= float(sample.labels["le"]) or sample.exemplar.value == 0
                assert float(sample.exemplar.timestamp) > 1_700_000_000 and sample.name.endswith("_bucket")
                found.setdefault((family.name, label), []).append(sample.exemplar.labels["trace_id"])
            least = float(sample.labels.get("le", "0")) if sample.name.endswith("_bucket") else 0.0
    return found


def test_histograms_name_the_trace_of_a_message_in_each_bucket(spans: InMemorySpanExporter) -> None:
    """Two messages in one bucket, and one in another; a message without a sampled trace is no exemplar."""
    with InMemoryServer(tracing=True) as server:
        server.freeze()
        subscribe(server.url, "points", "t")
        unsampled = traced(4, "00")
        for seconds, headers in ((0.03, {}), (0.03, traced(1)), (0.031, traced(2)), (0.3, traced(3)), (3, unsampled)):
            post(server.url, "/v1/messages", {"messages": [{"topic": "t", "body": "x", "headers": headers}]})
            server.advance(seconds)
            (message,) = Caller(server.url, "points", "i").receive("t")
            items = {"items": [{"receipt": message["receipt"], "action": "ack"}]}
            post(server.url, f"/v1/groups/points/settle?handled=61000_6.1&slowest=61000.{trace_id(5)}", items)
            server.advance(LOOK_US / 1e6)
        consumed = [trace_id(1), trace_id(3)]
        assert exemplars(server.url) == {
            ("notify_commit_to_consumer_seconds", "points"): consumed,
            ("notify_commit_to_ack_seconds", "points"): consumed,
            ("notify_handler_seconds", "points"): [trace_id(5)],
        }
        plain = str(call(server.url, "GET", "/metrics"))
        assert " # {" not in plain and "# EOF" not in plain
        assert trace_id(1) not in plain, "the plain format has no exemplars"


def test_a_consumer_reports_the_trace_of_its_slowest_call(spans: InMemorySpanExporter) -> None:
    with InMemoryServer(tracing=True) as server, TransactionProducer(server.url, group="p") as producer:
        consumer = Consumer(server.url, group="points")
        consumer.subscribe("t", start="earliest")(lambda message: None)
        with trace.get_tracer("shop").start_as_current_span("POST /orders") as root:
            producer.publish(Message("t", "x"))
        with running(consumer):
            key = ("notify_handler_seconds", "points")
            (named,) = eventually(lambda: exemplars(server.url).get(key), "the exemplar of the handler")
    assert int(named, 16) == root.get_span_context().trace_id


def test_a_check_is_an_exemplar_of_its_trace(spans: InMemorySpanExporter) -> None:
    with InMemoryServer(tracing=True) as server:
        name = new_id()
        post(server.url, "/v1/transactions", half_request("orders", name, topic="t", headers=traced(1)))
        server.advance(60)
        asked = {"producer_group": "orders", "instance": "i", "wait": 30}
        (check,) = post(server.url, "/v1/checks/poll", asked)["checks"]
        outcome = {"id": name, "outcome": "COMMIT", "check": check["token"]}
        post(server.url, "/v1/transactions/outcomes", {"producer_group": "orders", "outcomes": [outcome]})
        assert exemplars(server.url) == {("notify_check_back_seconds", "orders"): [trace_id(1)]}


def test_a_server_that_does_not_trace_has_no_exemplars(spans: InMemorySpanExporter) -> None:
    with InMemoryServer() as server:
        subscribe(server.url, "points", "t")
        post(server.url, "/v1/messages", {"messages": [{"topic": "t", "body": "x", "headers": traced(1)}]})
        Caller(server.url, "points", "i").settle(Caller(server.url, "points", "i").receive("t"))
        assert exemplars(server.url) == {}


def trace_id(number: int) -> str:
    return f"{number:032x}"


def traced(number: int, flags: str = "01") -> dict[str, str]:
    """The headers of a message in a trace of its own."""
    return {tracing.HEADER: f"00-{trace_id(number)}-{number:016x}-{flags}"}
