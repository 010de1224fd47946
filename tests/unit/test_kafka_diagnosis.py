"""A broker that refuses a login or whose certificate is refused, told from one that does not answer."""

from __future__ import annotations

import pytest

pytest.importorskip("confluent_kafka")

from confluent_kafka import KafkaError

from notify.kafka.cluster import Cluster
from notify.kafka.diagnosis import refusal, refuses

CLUSTER = Cluster.of("kafka://127.0.0.1:1?security.protocol=SSL")
VERIFY_FAILED = "error:0A000086:SSL routines::certificate verify failed"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (KafkaError._SSL, f"ssl://127.0.0.1:1/bootstrap: SSL handshake failed: {VERIFY_FAILED}"),
        # The same where the handshake ends in its first step, as it does on a slow machine.
        (KafkaError._TRANSPORT, f"ssl://127.0.0.1:1/bootstrap: {VERIFY_FAILED}"),
    ],
)
def test_a_certificate_that_is_refused_is_told_at_each_step_of_the_handshake(code: int, text: str) -> None:
    error = KafkaError(code, text)
    assert refuses(error)
    assert "TLS with Kafka at 127.0.0.1:1 fails" in str(refusal(error, CLUSTER))


def test_a_broker_that_hangs_up_refuses_nothing() -> None:
    assert not refuses(KafkaError(KafkaError._TRANSPORT, "ssl://127.0.0.1:1/bootstrap: Disconnected"))
