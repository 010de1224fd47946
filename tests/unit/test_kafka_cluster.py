"""A Kafka URL, its settings and the file of settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from notify.errors import InvalidRequest

pytest.importorskip("confluent_kafka")

from notify.kafka.cluster import SETTINGS_FILE, Cluster


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


def test_a_setting_that_promises_hang_on_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"'isolation.level' is Notify's own"):
        Cluster.of("kafka://a:9092?isolation.level=read_uncommitted")


def test_a_url_without_brokers_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="names brokers"):
        Cluster.of("kafka://")


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
def test_a_setting_that_is_no_text_is_refused(setting: str) -> None:
    with pytest.raises(InvalidRequest, match="refuses its settings"):
        Cluster.of(f"kafka://127.0.0.1:9?{setting}=x").producer({})


def test_a_cluster_in_a_log_shows_no_password() -> None:
    assert "hush" not in repr(Cluster.of("kafka://a:9092?sasl.password=hush"))


def test_a_cluster_as_a_url_is_the_same_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "client.properties"
    file.write_text("sasl.password=a&b=c d\n")
    monkeypatch.setenv(SETTINGS_FILE, str(file))
    cluster = Cluster.of("kafka://a:9092,b:9092?client.id=x&notify.partitions=7")
    monkeypatch.delenv(SETTINGS_FILE)
    assert Cluster.of(cluster.url) == cluster
