"""OpenTelemetry traces from a message's producer to its effect; the message's header `traceparent` carries the context.

Without `opentelemetry-api`, or without a tracer provider, nothing is traced. Names and attributes follow the
conventions for messaging (https://opentelemetry.io/docs/specs/semconv/messaging/).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Protocol, TypeVar

from notify.protocol.limits import LIMITS

try:
    from opentelemetry import trace
    from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags
except ImportError:  # the extra `otel` is not installed
    trace = None  # type: ignore[assignment]

T = TypeVar("T")

HEADER = "traceparent"
_TRACEPARENT = re.compile("00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
SYSTEM = "notify"
_SCOPE = "notify"
_NO_SPAN = contextlib.nullcontext()


class Traced(Protocol):
    """A message that is being sent."""

    topic: str
    headers: dict[str, str] | None


@cache
def _tracer() -> trace.Tracer:
    """The tracer, made once; OpenTelemetry connects it to a provider that is set later."""
    return trace.get_tracer(_SCOPE)


def parse(headers: Mapping[str, str] | None) -> SpanContext | None:
    """The span context in the headers; None if they have no valid context, or it is not sampled."""
    text = (headers or {}).get(HEADER) if trace is not None else None
    # `int` alone would also take signs, spaces and underscores.
    if text is None or len(text) != 55 or (parts := _TRACEPARENT.fullmatch(text)) is None:
        return None
    trace_id, span_id, flags = int(parts[1], 16), int(parts[2], 16), int(parts[3], 16)
    context = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
    return context if context.is_valid and context.trace_flags.sampled else None


def trace_id(headers: Mapping[str, str] | None) -> str:
    """The id of the sampled trace in the headers, 32 hexadecimal digits; "" if they have none."""
    context = parse(headers)
    return "" if context is None else f"{context.trace_id:032x}"


@contextlib.contextmanager
def sending(messages: Sequence[Traced]) -> Iterator[None]:
    """A span around sending messages; each message gets the span's context, unless it has a `traceparent` already."""
    if trace is None or not messages:
        yield
        return
    attributes = _attributes("send", messages[0].topic) | {"messaging.batch.message_count": len(messages)}
    span = _tracer().start_span(f"send {messages[0].topic}", kind=SpanKind.PRODUCER, attributes=attributes)
    context = span.get_span_context()
    if not context.is_valid:  # there is no tracer provider, and making this the current span would be expensive
        yield
        return
    with trace.use_span(span, end_on_exit=True):
        if context.trace_flags.sampled:
            text = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
            for message in messages:
                headers = message.headers or {}
                if HEADER not in headers and _has_room(headers, text):
                    message.headers = headers | {HEADER: text}
        yield


def _has_room(headers: Mapping[str, str], text: str) -> bool:
    """Whether another header is within the bounds, because tracing must not cause a refusal."""
    size = sum([len(name.encode()) + len(value.encode()) for name, value in headers.items()])
    return len(headers) < LIMITS.headers and size + len(HEADER) + len(text) <= LIMITS.headers_bytes


@contextlib.contextmanager
def continued(
    operation: str, topic: str, headers: Mapping[str, str] | None, **attributes: str | int
) -> Iterator[Callable[[str, str | int], None]]:
    """A span `operation topic` whose parent is in the headers. Yields a function that sets further attributes."""
    context = parse(headers)
    if context is None:
        yield lambda name, value: None
        return
    parent = trace.set_span_in_context(NonRecordingSpan(context))
    kind = SpanKind.CONSUMER if operation == "process" else SpanKind.CLIENT
    span_attributes = _attributes(operation, topic) | {f"messaging.{name}": value for name, value in attributes.items()}
    with _tracer().start_as_current_span(f"{operation} {topic}", parent, kind, span_attributes) as span:
        yield span.set_attribute


def traced(function: Callable[..., T], group: str, message: Any) -> Callable[..., T]:
    """`function` wrapped in `processing`, to be called in a thread; `function` itself if the message has no trace."""
    if parse(message.headers) is None:
        return function

    def call(*arguments: Any) -> T:
        with processing(group, message):
            return function(*arguments)

    return call


def processing(group: str, message: Any) -> Any:
    """A span around the handling of a received message."""
    if parse(message.headers) is None:
        return _NO_SPAN
    attributes = {"consumer.group.name": group, "message.id": message.id, "notify.attempt": message.attempt}
    return continued("process", message.topic, message.headers, **attributes)


@contextlib.contextmanager
def processing_batch(group: str, messages: Sequence[Any]) -> Iterator[None]:
    """A span around the handling of several messages in one call, with links to the spans that they continue."""
    headers = [message.headers for message in messages if HEADER in message.headers]
    contexts = [context for each in headers if (context := parse(each)) is not None]
    if not contexts:
        yield
        return
    topic = messages[0].topic
    attributes = _attributes("process", topic) | {
        "messaging.consumer.group.name": group,
        "messaging.batch.message_count": len(messages),
    }
    links = [trace.Link(context) for context in contexts]
    with _tracer().start_as_current_span(
        f"process {topic}", kind=SpanKind.CONSUMER, attributes=attributes, links=links
    ):
        yield


def record(
    operation: str, topic: str, headers: Mapping[str, str] | None, start_us: int, end_us: int, **attributes: str | int
) -> None:
    """Record a server's work for a message as a span of its trace; instants in microseconds since 1970."""
    context = parse(headers)
    if context is None:
        return
    parent = trace.set_span_in_context(NonRecordingSpan(context))
    span_attributes = _attributes(operation, topic) | {f"messaging.{name}": value for name, value in attributes.items()}
    span = _tracer().start_span(
        f"{operation} {topic}", parent, SpanKind.SERVER, span_attributes, start_time=start_us * 1000
    )
    span.end(end_us * 1000)


def _attributes(operation: str, topic: str) -> dict[str, Any]:
    return {
        "messaging.system": SYSTEM,
        "messaging.destination.name": topic,
        "messaging.operation.name": operation,
    }


def export_from_environment() -> None:
    """Export this process's spans as configured by OpenTelemetry's environment variables (such as
    `OTEL_EXPORTER_OTLP_ENDPOINT`).

    Raises ImportError if the extra `otel` is not installed.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "notify"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
