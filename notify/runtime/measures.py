"""OpenTelemetry metrics of large bodies, counted in the process that stores, reads or sweeps them.

Servers never open a body, so they can count none of this. Without `opentelemetry-api`, or without a meter provider,
nothing is counted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from notify.errors import InvalidRequest


class Measure(NamedTuple):
    """One metric."""

    name: str
    unit: str
    attributes: tuple[str, ...]
    text: str


UPLOADS = Measure(
    "notify.bodies.uploads", "{body}", ("group", "outcome"),
    "Bodies that a producer put into its store before a commit. `outcome`: `stored`; `failed`, the store refused or "
    "did not answer; `late`, not stored within `store_timeout`. The commit is refused unless all bodies are `stored`",
)  # fmt: skip
UPLOADED = Measure("notify.bodies.uploaded", "By", ("group",), "The bytes of these bodies, compressed if they are")
UPLOAD_SECONDS = Measure(
    "notify.bodies.upload.duration", "s", ("group",), "How long the upload of a body took, while its transaction waited"
)
READS = Measure(
    "notify.bodies.reads", "{body}", ("outcome",),
    "Bodies that a consumer fetched. `outcome`: `read`, or the code of the error that the message fails with: "
    "`body_missing`, `body_altered`, `body_unavailable`, `object_store_failed`, `dead_letter`",
)  # fmt: skip
READ = Measure("notify.bodies.read", "By", (), "The bytes of these bodies, as they are stored")
READ_SECONDS = Measure("notify.bodies.read.duration", "s", (), "How long fetching a body took, before its handler")
SWEEPS = Measure(
    "notify.bodies.sweeps", "{sweep}", ("outcome",),
    "Sweeps that `notify store sweep` ran. `outcome`: `done`, or `failed`: nothing was deleted, or not all of it",
)  # fmt: skip
SWEPT = Measure(
    "notify.bodies.swept", "{body}", ("outcome",),
    "Bodies that a sweep looked at. `outcome`: `deleted`; `named`, spared because a message or a row needs it; "
    "`young`, spared because of its age",
)  # fmt: skip
FREED = Measure("notify.bodies.freed", "By", (), "The bytes of the bodies that sweeps deleted")
MEASURES = (UPLOADS, UPLOADED, UPLOAD_SECONDS, READS, READ, READ_SECONDS, SWEEPS, SWEPT, FREED)


def add(measure: Measure, amount: float, **attributes: str) -> None:
    """Add to a counter, or record a duration in seconds."""
    instrument = _instrument(measure)
    if instrument is not None:
        (instrument.record if measure.unit == "s" else instrument.add)(amount, attributes)


@cache
def _instrument(measure: Measure) -> Any:
    """The instrument, made once; OpenTelemetry connects it to a provider that is set later. None without the extra
    `otel`, whose import is left to processes that have large bodies."""
    try:
        from opentelemetry import metrics
    except ImportError:
        return None
    meter = metrics.get_meter("notify")
    make = meter.create_histogram if measure.unit == "s" else meter.create_counter
    return make(measure.name, unit=measure.unit, description=measure.text)


@contextlib.contextmanager
def exported() -> Iterator[None]:
    """Export what is counted within, at its end, if OpenTelemetry's environment variables name an endpoint.

    For commands that end by themselves, which nobody could scrape. Raises InvalidRequest without the extra `otel`.
    """
    if not any(os.environ.get(f"OTEL_EXPORTER_OTLP_{kind}ENDPOINT") for kind in ("", "METRICS_")):
        yield
        return
    try:
        from opentelemetry import metrics
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
    except ImportError as error:
        raise InvalidRequest(
            f"exporting metrics needs the extra otel: pip install 'notify-tx[otel]' ({error})"
        ) from None
    resource = Resource.create({"service.name": "notify"})
    provider = MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())], resource=resource)
    metrics.set_meter_provider(provider)
    try:
        yield
    finally:
        provider.shutdown()
