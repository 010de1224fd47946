"""A Kafka node with TLS, SASL and ACLs: what each part of Notify may do there, and what it says where it may not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from notify.client import Consumer
from notify.errors import Forbidden, InvalidRequest, NotifyError, Unauthorized, Unavailable
from notify.movers.sinks.sink import Sink, open_sink, running_beside
from notify.protocol import ids
from notify.protocol.wire import Bridged, BridgedTransaction, PackedBridgeBatch, PackedMessage
from notify.testing.process import ServerProcess
from tests.support.clock import eventually
from tests.support.commands import cli
from tests.support.groups import running
from tests.support.http import REASON, ask
from tests.support.own_server import own_server
from tests.support.shop import make_engine

pytest.importorskip("confluent_kafka")

from notify.client import create_tables
from notify.kafka import rights
from notify.kafka.brokers import known_topics, make_topics
from notify.kafka.cluster import SETTINGS_FILE, Cluster
from notify.kafka.diagnosis import why_unreachable
from notify.kafka.groups import dead_letter_topic
from notify.kafka.rights import GROUP, TOPIC, TRANSACTIONAL_ID, Need, Needs
from notify.kafka.subscriptions import TOPIC as SUBSCRIPTIONS
from notify.kafka.table import newest
from tests.support.kafka import committed, patient_sink
from tests.support.kafka_consumers import produce
from tests.support.secured_kafka import ADMIN, SecuredKafka

PATIENT_SECONDS = 60.0


@pytest.fixture(scope="module")
def secured() -> Iterator[SecuredKafka]:
    with own_server("secured", SecuredKafka) as kafka:
        yield kafka


# --- login, certificates, addresses ---------------------------------------------------------------------------


def _without_tls(kafka: SecuredKafka, **settings: str) -> str:
    query = "&".join(f"{name.replace('_', '.')}={value}" for name, value in settings.items())
    return f"kafka://{kafka.brokers}?{query}"


@pytest.mark.long
def test_why_no_broker_answers_is_one_sentence(secured: SecuredKafka) -> None:
    plain, port = secured.cluster.brokers, secured.port
    ca = str(secured.authority.file)
    stranger = secured.other_authority()
    cases: list[tuple[str, type[NotifyError], str]] = [
        (secured.url(ADMIN, "wrong"), Unauthorized, r"refuses the login of 'admin' by SCRAM-SHA-512: set sasl\.user"),
        (secured.url("nobody"), Unauthorized, r"refuses the login of 'nobody' by SCRAM-SHA-512"),
        (secured.url(ADMIN, sasl_mechanism="PLAIN"), Unauthorized, r"no login by PLAIN: set sasl\.mechanism to SCRAM"),
        (secured.url(ADMIN, ssl_ca_location=str(stranger)), Unauthorized, r"TLS with .*: set ssl\.ca\.location"),
        (
            secured.url(ADMIN).replace("127.0.0.1", "localhost"), Unauthorized,
            "the broker's certificate is for another name than 'localhost'",
        ),
        (_without_tls(secured), Unavailable, r"does not answer to PLAINTEXT: .* security\.protocol should be SASL_SSL"),
        (
            _without_tls(secured, security_protocol="SSL", ssl_ca_location=ca), Unavailable,
            r"does not answer to SSL: .* security\.protocol should be SASL_SSL, with a login",
        ),
        (secured.url(ADMIN).replace(secured.brokers, plain), Unavailable, "to TLS: .* as a listener without TLS does"),
        (
            secured.url(ADMIN, security_protocol="SASL_PLAINTEXT").replace(secured.brokers, plain), Unauthorized,
            "asks for no login: leave the sasl settings out",
        ),
        (f"kafka://127.0.0.1:{port + 1}", Unavailable, "does not answer: .*; is it running there"),
    ]  # fmt: skip
    for url, kind, text in cases:
        said = why_unreachable(Cluster.of(url), PATIENT_SECONDS)
        assert isinstance(said, kind), (url, said)
        with pytest.raises(kind, match=text):
            raise said
        assert "\n" not in str(said)
    assert why_unreachable(Cluster.of(secured.url(ADMIN))) is None


@pytest.mark.long
def test_every_part_says_that_the_password_is_wrong(
    secured: SecuredKafka, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("notify.kafka.brokers.FIRST_ANSWER_SECONDS", 0.5)
    refused = f"refuses the login of '{ADMIN}'"
    file = secured.settings_file(ADMIN, "wrong")
    monkeypatch.setenv(SETTINGS_FILE, str(file))
    url = f"kafka://{secured.brokers}"
    engine = make_engine(f"sqlite:///{tmp_path}/outbox.db")
    create_tables(engine)
    engine.dispose()
    code, said = cli("relay", "--dsn", f"sqlite:///{tmp_path}/outbox.db", "--url", url, "--once")
    assert (code, refused in said["text"]) == (2, True), said
    with pytest.raises(Unauthorized, match=refused):
        asyncio.run(_claimed(url, unique))
    consumer = Consumer(url, group=unique)
    consumer.subscribe("a")(print)
    with pytest.raises(Unauthorized, match=refused):
        consumer.run(signals=False)
    with pytest.raises(Unauthorized, match=refused):
        known_topics(Cluster.of(url))
    server = ServerProcess(tmp_path / "server", flags=["--kafka", url], environment={SETTINGS_FILE: str(file)}).start()
    try:

        def said_by_the_server() -> bool:  # a slow machine's server first says that Kafka answers too slowly
            status, answer = ask(server.url, "GET", "/v1/admin/groups")
            assert status == 503
            return refused in answer["detail"]

        eventually(said_by_the_server, "the server to say so")
    finally:
        server.stop()


@pytest.mark.long
def test_names_and_passwords_with_signs_are_taken_as_they_are(
    secured: SecuredKafka, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plus in a URL became a space, and the login was refused."""
    name, password = f"{unique}+x@realm", "a+b c%2B@/?#&=%"
    secured.add_user(name, password)
    settings = secured.settings(name, password)
    with_plus = {"security.protocol": "SASL_SSL", "sasl.mechanism": "SCRAM-SHA-512"} | {
        "sasl.username": name, "sasl.password": "a+b%20c%252B@/?#%26=%", "ssl.ca.location": settings["ssl.ca.location"],
    }  # fmt: skip
    brokers = f"kafka://{secured.brokers}"
    for url in (
        Cluster(secured.brokers, settings).url,
        f"{brokers}/?{urlencode(settings, quote_via=quote)}",
        f"{brokers}?{'&'.join(f'{n}={v}' for n, v in with_plus.items())}",
    ):
        assert known_topics(Cluster.of(url)) is not None
    file = tmp_path / "client.properties"
    file.write_text("".join(f"{n} = {v}\n" for n, v in settings.items()))
    monkeypatch.setenv(SETTINGS_FILE, str(file))
    assert known_topics(Cluster.of(brokers)) is not None


# --- rights ---------------------------------------------------------------------------------------------------


async def _claimed(url: str, source: str) -> None:
    sink = patient_sink(url)
    try:
        await sink.claim(source)
    finally:
        await sink.close()


async def _append(sink: Sink, source: str, epoch: int, topic: str, text: str, **fields: Any) -> Bridged:
    message = PackedMessage(topic=topic, body=text.encode(), key="k", **fields)
    sent = BridgedTransaction(ids.to_text(ids.new_id()), "g", [message])
    batch = PackedBridgeBatch(epoch=epoch, expected_position="", position=text, transactions=[sent])
    return await sink.append(source, batch)


async def _published(url: str, source: str, topic: str) -> Bridged:
    sink = patient_sink(url)
    try:
        epoch, _ = await sink.claim(source)
        return await _append(sink, source, epoch, topic, "one")
    finally:
        await sink.close()


def texts(secured: SecuredKafka, topic: str, wanted: int) -> list[str]:
    return [record.value().decode() for record in committed(secured.cluster.url, topic, wanted)]


@pytest.mark.long
def test_a_bridge_needs_these_rights_and_no_more(secured: SecuredKafka, unique: str) -> None:
    topic = f"orders.{unique}"
    url = secured.url(secured.user(rights.of_bridge(unique, [topic])))

    async def publish() -> None:
        sink = patient_sink(url)
        epoch, _ = await sink.claim(unique)
        assert not (await _append(sink, unique, epoch, topic, "one")).refused
        assert not (await _append(sink, unique, epoch, topic, "late", delay=0.1)).refused
        assert await sink.position(unique) == "late"
        await sink.close()

    with running_beside(url):
        asyncio.run(publish())
        assert sorted(texts(secured, topic, 2)) == ["late", "one"]


BRIDGE_LACKS = [
    (
        TOPIC,
        "notify-bridge-positions",
        "Read",
        Forbidden,
        "Create and DescribeConfigs on topic notify-bridge-positions",
    ),
    (TOPIC, "notify-bridge-positions", "Create", InvalidRequest, "grant Create on the topic"),
    (GROUP, "notify-positions", "Read", Forbidden, "Read on group notify-positions"),
    (TRANSACTIONAL_ID, "notify-bridge-", "Write", Forbidden, "Write on transactional id notify-bridge-"),
]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "name", "operation", "error", "text"), BRIDGE_LACKS)
def test_a_bridge_says_which_right_it_lacks(
    secured: SecuredKafka, unique: str, kind: str, name: str, operation: str, error: type[NotifyError], text: str
) -> None:
    needs = without(rights.of_bridge(unique, [f"orders.{unique}"]), kind, name, operation)
    with pytest.raises(error, match=text):
        asyncio.run(_claimed(secured.url(secured.user(needs)), unique))


@pytest.mark.long
@pytest.mark.parametrize(
    ("operation", "text"), [("Write", "grant user .* Write on the topic"), ("Create", "grant Create on the topic")]
)
def test_a_topic_that_the_bridge_has_no_right_to_is_refused_with_the_right(
    secured: SecuredKafka, unique: str, operation: str, text: str
) -> None:
    topic = f"orders.{unique}"
    needs = without(rights.of_bridge(unique, [topic]), TOPIC, topic, operation)
    (item,) = asyncio.run(_published(secured.url(secured.user(needs)), unique, topic)).refused
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(item.detail)


def without(needs: Needs, kind: str, name: str, operation: str) -> Needs:
    """The needs but for one operation on the resource whose name begins so."""
    changed: list[Need] = []
    for need in needs.needs:
        lacks = need.kind == kind and need.name.startswith(name)
        left = tuple(each for each in need.operations if not lacks or each != operation)
        changed.append(need._replace(operations=left))
    assert tuple(changed) != needs.needs
    return Needs(needs.role, tuple(changed))


class Handled:
    """The texts that a consumer's handler was called with: `bad` fails."""

    def __init__(self, url: str, group: str, topic: str, mode: str = "shared") -> None:
        self.texts: list[str] = []
        self.consumer = Consumer(url, group=group, instance="i")
        options: dict[str, Any] = {"start": "earliest", "max_attempts": 2, "retry_min": 0.05, "retry_max": 0.1}
        self.consumer.subscribe(topic, mode=mode, **options)(self._handle)

    def _handle(self, message: Any) -> None:
        self.texts.append(message.text)
        if message.text == "bad":
            raise RuntimeError("bad")

    def have(self, *wanted: str) -> None:
        eventually(lambda: set(wanted) <= set(self.texts), f"{wanted} to be handled")


def noted_by(url: str) -> set[str]:
    """The groups that noted what they take."""
    return {key.decode().partition("/")[0] for key in newest(Cluster.of(url), SUBSCRIPTIONS)}


@pytest.mark.long
@pytest.mark.parametrize("mode", ["shared", "exclusive", pytest.param("broadcast", marks=pytest.mark.long)])
def test_a_consumer_needs_these_rights_and_no_more(secured: SecuredKafka, unique: str, mode: str) -> None:
    topic, plain = f"orders.{unique}", secured.cluster.url
    make_topics(Cluster.of(plain), [topic])
    produce(plain, topic, ["good", "bad"])
    handled = Handled(secured.url(secured.user(rights.of_consumer(unique, [topic]))), unique, topic, mode)
    with running(handled.consumer):
        (letter,) = committed(plain, dead_letter_topic(unique), 1)
        assert letter.value() == b"bad"
    assert sorted(handled.texts) == ["bad", "bad", "good"]
    if mode != "broadcast":
        assert unique in noted_by(plain), "what audits need to know was noted"


CONSUMER_LACKS = [
    (TOPIC, "orders.", "Read", InvalidRequest, "shows no topic 'orders"),
    (GROUP, "n", "Read", Forbidden, "Read on groups that begin with"),
    (TOPIC, "notify-control", "Read", Forbidden, "Read and Create on topic notify-control"),
    (TOPIC, "dead-letter.", "Create", InvalidRequest, "refuses to make it: grant Create"),
]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "name", "operation", "error", "text"), CONSUMER_LACKS)
def test_a_consumer_says_which_right_it_lacks(
    secured: SecuredKafka, unique: str, kind: str, name: str, operation: str, error: type[NotifyError], text: str
) -> None:
    topic = f"orders.{unique}"
    make_topics(Cluster.of(secured.cluster.url), [topic, "notify-control"])
    needs = without(rights.of_consumer(unique, [topic]), kind, name, operation)
    with pytest.raises(error, match=text):
        Handled(secured.url(secured.user(needs)), unique, topic).consumer.run(signals=False)


@pytest.mark.long
def test_a_retry_that_may_not_be_written_undoes_nothing_beside_it(secured: SecuredKafka, unique: str) -> None:
    """Its neighbours were handled again at each start, and its attempts started over: it never became a dead letter."""
    topic, plain = f"orders.{unique}", secured.cluster.url
    make_topics(Cluster.of(plain), [topic])
    produce(plain, topic, ["bad", "good", "fine"])
    needs = without(rights.of_consumer(unique, [topic]), TOPIC, "retry.", "Write")
    handled = Handled(secured.url(secured.user(needs)), unique, topic)
    with running(handled.consumer):
        (letter,) = committed(plain, dead_letter_topic(unique), 1)
    assert letter.value() == b"bad"
    assert sorted(handled.texts) == ["bad", "bad", "fine", "good"]


@pytest.mark.long
def test_a_server_needs_these_rights_and_no_more(
    secured: SecuredKafka, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, plain = f"orders.{unique}", secured.cluster.url
    make_topics(Cluster.of(plain), [topic])
    produce(plain, topic, ["bad"])
    handled = Handled(plain, unique, topic)
    with running(handled.consumer):
        committed(plain, dead_letter_topic(unique), 1)
    asyncio.run(_published(plain, unique, topic))
    user = secured.user(rights.of_server())
    server = ServerProcess(
        tmp_path, flags=["--kafka", f"kafka://{secured.brokers}"],
        environment={SETTINGS_FILE: str(secured.settings_file(user))},
    ).start()  # fmt: skip

    def admin(method: str, path: str, **body: Any) -> Any:
        sent = None if method == "GET" else {"reason": REASON} | body
        status, answer = ask(server.url, method, f"/v1/admin/{path}", sent)
        assert status == 200, answer
        return answer

    try:
        assert [g["name"] for g in admin("GET", f"groups?prefix={unique}")["groups"]] == [unique]
        shown = admin("GET", f"groups/{unique}")
        assert (shown["subscriptions"][0]["topic"], shown["queues"][0]["topic"]) == (topic, topic)
        assert len(admin("GET", f"groups/{unique}/dead-letters")["messages"]) == 1
        assert admin("GET", "overview")["queues"]["groups"] >= 1  # the age of a message needs Read, and is left out
        assert admin("GET", f"topics/{topic}")["retention"] is None  # so are a topic's settings
        assert "sources" in admin("GET", "refused")
        assert unique in [bridge["source"] for bridge in admin("GET", "bridges")["bridges"]]
        admin("POST", f"groups/{unique}/pause")
        admin("POST", f"groups/{unique}/resume")
        admin("POST", f"groups/{unique}/reset", topic=topic, to="earliest")
        assert len(admin("POST", f"groups/{unique}/dead-letters/redrive")["result"]["items"]) == 1
        admin("POST", f"groups/{unique}/dead-letters/purge", before="latest")
        assert admin("GET", f"groups/{unique}/dead-letters")["messages"] == []
    finally:
        server.stop()


@pytest.mark.long
def test_an_audit_needs_these_rights_and_no_more(secured: SecuredKafka, unique: str) -> None:
    pytest.importorskip("pyspark")
    from notify.spark.inputs.kafka_input import KafkaInput

    topic, plain = f"orders.{unique}", secured.cluster.url
    asyncio.run(_published(plain, unique, topic))
    with running(Handled(plain, unique, topic).consumer):
        eventually(
            lambda: any(key.decode().startswith(f"{unique}/") for key in newest(Cluster.of(plain), SUBSCRIPTIONS))
        )
        (record,) = committed(plain, topic, 1)
    (name,) = [value for key, value in record.headers() if key == "notify-id"]
    audited = KafkaInput(secured.url(secured.user(rights.of_audit())), [topic])
    audited.prepare()
    assert list(audited.groups()) == [unique]
    assert [group for group, _ in audited.progress.subscribed if group == unique]
    assert [bridged.source for bridged in audited.bridges if bridged.source == unique]
    transaction = bytes.fromhex(name.decode().partition(".")[0].replace("-", ""))
    assert [row["no"] for row in audited.records_of(transaction)] == [0]
    audited = KafkaInput(secured.url(secured.user(Needs("audit", ()))), [topic])
    with pytest.raises(InvalidRequest, match=f"no topic {topic}"):
        audited.prepare()


@pytest.mark.long
def test_topics_hidden_from_an_audit_are_named(secured: SecuredKafka, unique: str) -> None:
    """Their lists leave out what a user may not see: messages would be lost, and a group would not be behind."""
    pytest.importorskip("pyspark")
    from notify.spark.inputs.kafka_input import KafkaInput

    topic, other, plain = f"orders.{unique}", f"payments.{unique}", secured.cluster.url
    for name in (topic, other):
        asyncio.run(_published(plain, f"{unique}.{name}", name))
    with running(Handled(plain, unique, topic).consumer), running(Handled(plain, f"{unique}.2", other).consumer):
        for group in (unique, f"{unique}.2"):
            eventually(
                lambda group=group: any(
                    key.decode().startswith(f"{group}/") for key in newest(Cluster.of(plain), SUBSCRIPTIONS)
                )
            )
        committed(plain, topic, 1)

    def hidden(*needs: Need) -> list[str]:
        """The sentences of an audit with these rights."""
        groups = (Need(GROUP, "notify-audit", ("Read",), ""), Need(GROUP, "notify-positions", ("Read",), ""))
        audited = KafkaInput(secured.url(secured.user(Needs("audit", (*groups, *needs)))))
        audited.prepare()
        return audited.hidden + audited.hides([topic])

    every = Need(TOPIC, "*", ("Read", "DescribeConfigs"), "")
    assert not [why for why in hidden(every, Need(GROUP, "*", ("Describe",), "")) if unique in why]
    (why,) = hidden(every, Need(GROUP, unique, ("Describe",), ""))
    assert "hides consumer groups" in why and f"{unique}.2" in why and "grant it Describe" in why
    noted = Need(TOPIC, SUBSCRIPTIONS, ("Read", "DescribeConfigs"), "")
    seen = Need(TOPIC, other, ("Read", "DescribeConfigs"), "")
    whys = hidden(noted, seen, Need(GROUP, "*", ("Describe",), ""))
    assert len(whys) == 2 and all("hides topics" in why and topic in why for why in whys)
    assert f"retry.{unique}" in whys[0] and "notify-redriven" in whys[0]


# --- what comes and goes --------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_right_that_is_withdrawn_for_a_while_costs_a_bridge_nothing(secured: SecuredKafka, unique: str) -> None:
    topic = f"orders.{unique}"
    user = secured.user(rights.of_bridge(unique, [topic]))
    write = secured.grant_of(Need(TOPIC, topic, ("Write",), ""))

    async def publish() -> None:
        sink = open_sink(secured.url(user))
        epoch, _ = await sink.claim(unique)
        await _append(sink, unique, epoch, topic, "one")
        secured.withdraw(user, write)
        said = ""
        while f"refuses user '{user}' a topic" not in said:  # it takes the broker a moment to know, and a first failure
            said = await _said(sink, unique, topic, "more")
        assert f"Write and Create and DescribeConfigs on topic {topic}" in said
        secured.grant(user, [write])
        while said:
            said = await _said(sink, unique, topic, "two")
        await sink.close()

    asyncio.run(publish())
    assert texts(secured, topic, 2)[-1] == "two"


async def _said(sink: Sink, source: str, topic: str, text: str) -> str:
    """Publish as a bridge does; why it cannot now, "" where it can. A refusal for good is a failure."""
    try:
        epoch, _ = await sink.claim(source)
        assert not (await _append(sink, source, epoch, topic, text)).refused
    except Unavailable as error:
        return str(error)
    return ""


@pytest.mark.long
def test_a_delayed_message_waits_for_a_right_that_is_missing(
    secured: SecuredKafka, unique: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("notify.movers.sinks.delays.release.AGAIN_US", 200_000)
    topic = f"orders.{unique}"
    needs = rights.of_bridge(unique, [topic])
    user = secured.user(without(needs, TOPIC, topic, "Write"))
    url = secured.url(user)

    async def publish() -> None:
        sink = patient_sink(url)
        epoch, _ = await sink.claim(unique)
        assert not (await _append(sink, unique, epoch, topic, "late", delay=0.1)).refused
        await sink.close()

    asyncio.run(publish())
    with running_beside(url):
        eventually(lambda: f"grant user '{user}' Write on the topic" in caplog.text, "the right to be named")
        secured.grant(user, [secured.grant_of(Need(TOPIC, topic, ("Write",), ""))])
        assert texts(secured, topic, 1) == ["late"]


@pytest.mark.long
def test_a_position_that_may_not_be_seen_is_no_missing_one(secured: SecuredKafka, unique: str) -> None:
    """A publisher that took it for missing would begin again."""
    topic = f"orders.{unique}"
    asyncio.run(_published(secured.cluster.url, unique, topic))
    needs = rights.of_bridge(unique, [topic])
    for operation in ("Read", "Write"):
        needs = without(needs, TOPIC, "notify-bridge-positions", operation)
    url = secured.url(secured.user(needs))

    async def position() -> str:
        sink = patient_sink(url)
        try:
            return await sink.position(unique)
        finally:
            await sink.close()

    with pytest.raises(Forbidden, match="Create and DescribeConfigs on topic notify-bridge-positions"):
        asyncio.run(position())


TORN = [None, "", "security.protocol=SASL_SSL\nsasl.mech", "security.protocol=SASL_S"]
"""Contents of a file of settings while somebody replaces it; None: there is no file."""


def tear(file: Path, torn: str | None) -> None:
    file.unlink() if torn is None else file.write_text(torn)


@pytest.mark.long
def test_a_password_that_is_changed_costs_a_bridge_nothing(
    secured: SecuredKafka, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bridge that ran says that it is refused, and continues once the file of settings has the new password."""
    topic = f"orders.{unique}"
    user = secured.user(rights.of_bridge(unique, [topic]))
    monkeypatch.setenv(SETTINGS_FILE, str(secured.settings_file(user)))

    async def publish() -> None:
        sink = open_sink(f"kafka://{secured.brokers}")
        epoch, _ = await sink.claim(unique)
        await _append(sink, unique, epoch, topic, "one")
        secured.add_user(user, "another")
        with pytest.raises(Unavailable, match=f"refuses the login of '{user}'"):
            while True:
                await sink.claim(unique)
        for torn in TORN:
            tear(secured.settings_file(user), torn)
            with pytest.raises(Unavailable):
                await sink.claim(unique)
        secured.settings_file(user, "another")
        epoch, position = await sink.claim(unique)
        assert position == "one"
        await _append(sink, unique, epoch, topic, "two")
        await sink.close()

    asyncio.run(publish())
    monkeypatch.delenv(SETTINGS_FILE)
    assert texts(secured, topic, 2) == ["one", "two"]


@pytest.mark.long
def test_a_right_that_is_withdrawn_for_a_while_costs_a_consumer_nothing(
    secured: SecuredKafka, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    topic, plain = f"orders.{unique}", secured.cluster.url
    make_topics(Cluster.of(plain), [topic])
    user = secured.user(rights.of_consumer(unique, [topic]))
    read = secured.grant_of(Need(TOPIC, topic, ("Read",), ""))
    produce(plain, topic, ["first"])
    handled = Handled(secured.url(user), unique, topic)
    with running(handled.consumer):
        handled.have("first")
        secured.withdraw(user, read)
        eventually(lambda: f"group {unique} receives nothing" in caplog.text, "the consumer to say so")
        produce(plain, topic, ["later"])
        secured.grant(user, [read])
        handled.have("later")
    assert f"user '{user}'" in caplog.text


@pytest.mark.parametrize("torn", [pytest.param(None, marks=pytest.mark.long), "security.protocol=SASL_S"])
@pytest.mark.long
def test_a_file_of_settings_that_is_being_replaced_ends_no_consumer(
    secured: SecuredKafka,
    unique: str,
    torn: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A consumer that ran ended with the error of a file that was missing or cut for a moment."""
    monkeypatch.setattr("notify.client.kafka.loop.AGAIN_MAX_SECONDS", 1.0)
    topic, plain = f"orders.{unique}", f"{secured.cluster.url}?security.protocol=PLAINTEXT"
    make_topics(Cluster.of(plain), [topic])
    produce(plain, topic, ["first"])
    user = secured.user(rights.of_consumer(unique, [topic]))
    read = secured.grant_of(Need(TOPIC, topic, ("Read",), ""))
    file = secured.settings_file(user)
    whole = file.read_text()
    monkeypatch.setenv(SETTINGS_FILE, str(file))
    handled = Handled(f"kafka://{secured.brokers}", unique, topic)
    with running(handled.consumer):
        handled.have("first")
        tear(file, torn)
        secured.withdraw(user, read)
        said = "known before count" if torn is None else "refuses its settings"
        eventually(lambda: said in caplog.text, "the consumer to say so")
        file.write_text(whole)
        secured.grant(user, [read])
        produce(plain, topic, ["later"])
        handled.have("later")


@pytest.mark.long
def test_the_doctor_names_rights_that_a_role_lacks(secured: SecuredKafka, unique: str) -> None:
    topic, plain = f"orders.{unique}", secured.cluster.url
    make_topics(Cluster.of(plain), [topic])
    needs = rights.of_consumer(unique, [topic])
    role = f"consumer:{unique}"
    code, good = cli("doctor", "--kafka", secured.url(secured.user(needs)), "--as", role, "--json")
    mine = [line for line in good["kafka"] if line["check"] == "right of the consumer"]
    assert {line["level"] for line in mine} == {"ok", "unknown"}, mine
    assert f"Read on topic {topic} (messages)" in [line["text"] for line in mine if line["level"] == "ok"]
    user = secured.user(without(needs, GROUP, unique, "Read"))
    code, bad = cli("doctor", "--kafka", secured.url(user), "--as", role, "--json")
    assert code == 1
    lacks = f"grant user '{user}' Read on groups that begin with {unique}"
    assert any(lacks in finding for finding in bad["findings"]), bad["findings"]
