"""A Kafka URL, its settings and the file of settings; and what a cluster refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from notify.errors import InvalidRequest

pytest.importorskip("confluent_kafka")

import pytest
from confluent_kafka import KafkaError

from notify.kafka.cluster import SETTINGS_FILE, Cluster
from notify.kafka.diagnosis import refusal, refuses


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of settings."""
    path = tmp_path / "client.properties"
    monkeypatch.setenv(SETTINGS_FILE, str(path))
    return path


def test_settings_of_the_url_win_over_those_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "client.properties"
    file.write_text("# of the operators\nsecurity.protocol=SASL_SSL\n\nsasl.password = a=b\nclient.id=file\n")
    monkeypatch.setenv(SETTINGS_FILE, str(file))
    cluster = Cluster.of("kafka://a:9092,b:9092/?client.id=url&sasl.mechanism=SCRAM-SHA-512")
    assert cluster.brokers == "a:9092,b:9092"
    assert cluster.settings == {
        "security.protocol": "SASL_SSL",
        "sasl.password": "a=b",
        "client.id": "url",
        "sasl.mechanism": "SCRAM-SHA-512",
    }


@pytest.mark.parametrize(
    ("name", "promise"),
    [
        ("isolation.level", "messages of rolled-back transactions are not read"),
        ("auto.commit.enable", "a group's position follows its finished handlers"),
        ("acks", "each message is in Kafka once"),
        ("transaction.timeout.ms", "readers wait only a bounded time"),
    ],
)
def test_a_setting_that_promises_depend_on_is_refused_with_the_promise(name: str, promise: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name!r} is Notify's own, so that .*{promise}"):
        Cluster.of(f"kafka://a:9092?{name}=1")


def test_a_setting_that_does_not_count_is_named_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was overridden without a word."""
    monkeypatch.setattr("notify.kafka.cluster._LOGGED", set())
    cluster = Cluster.of("kafka://127.0.0.1:9?linger.ms=50&queue.buffering.max.ms=50&batch.size=1000&log_level=3")
    for _ in range(2):
        cluster.producer({"linger.ms": 5, "batch.size": 1000, "log_level": 6})
    assert caplog.messages == [
        "the Kafka setting 'linger.ms' does not count here: Notify itself sets 5",
        "the Kafka setting 'queue.buffering.max.ms' does not count here: Notify itself sets 5",
    ]


def test_a_url_without_brokers_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="names brokers"):
        Cluster.of("kafka://")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("a+b", "a+b"), ("a%2Bb", "a+b"), ("a%20b", "a b"), ("user@realm", "user@realm"), ("a%40b", "a@b"),
        ("a=b==", "a=b=="), ("a%26b", "a&b"), ("a#b?c/d", "a#b?c/d"), ("100%25", "100%"), ("100%", "100%"),
        ("%C3%BC", "ü"), ("", ""),
    ],
)  # fmt: skip
def test_a_password_in_a_url_is_taken_as_it_is(written: str, meant: str) -> None:
    """A plus became a space."""
    for url in (f"kafka://a:9092?sasl.password={written}&client.id=x", f"kafka://a:9092/?sasl.password={written}"):
        cluster = Cluster.of(url)
        assert (cluster.brokers, cluster.settings["sasl.password"]) == ("a:9092", meant)
        assert Cluster.of(cluster.url) == cluster


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("kafka://user:hush@a:9092", r"no user before its brokers: write kafka://host:9092\?sasl\.username"),
        ("kafka://a:9092/orders", "without a path"),
        ("http://a:9092", "is not a Kafka URL"),
        ("kafka://a:9092?sasl.password=x&hush", "write an & within a value as %26"),
    ],
)
def test_a_url_of_another_form_is_refused_and_its_secrets_are_not_shown(url: str, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text) as refused:
        Cluster.of(url)
    assert "hush" not in str(refused.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTINGS_FILE, str(tmp_path / "missing"))
    with pytest.raises(InvalidRequest, match="missing cannot be read"):
        Cluster.of("kafka://a:9092")
    (tmp_path / "wrong").write_text("ssl.ca.location\n")
    monkeypatch.setenv(SETTINGS_FILE, str(tmp_path / "wrong"))
    with pytest.raises(InvalidRequest, match=r"line 1 .* is not name=value"):
        Cluster.of("kafka://a:9092")


@pytest.mark.parametrize("kind", ["producer", "consumer", "admin"])
def test_an_unknown_setting_is_refused_with_its_name(kind: str) -> None:
    cluster = Cluster.of("kafka://127.0.0.1:9?no.such.setting=1")
    with pytest.raises(InvalidRequest, match=r"no\.such\.setting"):
        cluster.admin() if kind == "admin" else getattr(cluster, kind)({"group.id": "g"} if kind == "consumer" else {})


@pytest.mark.parametrize("setting", ["error_cb", "stats_cb", "oauth_cb", "default.topic.config"])
def test_a_setting_that_no_text_can_give_is_refused(setting: str) -> None:
    with pytest.raises(InvalidRequest, match="refuses its settings"):
        Cluster.of(f"kafka://127.0.0.1:9?{setting}=x").producer({})


def test_a_cluster_in_a_log_shows_no_password() -> None:
    assert "hush" not in repr(Cluster.of("kafka://a:9092?sasl.password=hush"))


def test_a_cluster_as_a_url_is_the_same_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "client.properties"
    file.write_text("sasl.password=a&b=c d+%2B#ü\n")
    monkeypatch.setenv(SETTINGS_FILE, str(file))
    cluster = Cluster.of("kafka://a:9092,b:9092?client.id=x&notify.partitions=7")
    monkeypatch.delenv(SETTINGS_FILE)
    assert Cluster.of(cluster.url) == cluster


@pytest.mark.parametrize("now", [None, "", "# half of a file\n", "client.id=x\nsasl.passw"])
def test_a_file_that_is_being_replaced_takes_no_settings_away(file: Path, now: str | None) -> None:
    """A process that ran ended with the error of a file that was missing or cut for a moment."""
    file.write_text("client.id=x\nsasl.password=old\n")
    cluster = Cluster.of("kafka://a:9092")
    if now is None:
        file.unlink()
    else:
        file.write_text(now)
    assert cluster.again().settings == cluster.settings
    file.write_text("client.id=x\nsasl.password=new\n")
    assert cluster.again().settings["sasl.password"] == "new"


def test_without_a_file_the_url_is_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SETTINGS_FILE, raising=False)
    cluster = Cluster.of("kafka://a:9092?client.id=x")
    assert cluster.again() == cluster


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
