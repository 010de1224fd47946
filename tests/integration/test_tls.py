"""TLS, mutual TLS and an identity provider, with certificates and keys that the tests make."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import os
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvloop
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from notify.client import Consumer, Message, TransactionProducer
from notify.errors import Forbidden, InvalidRequest, Unauthorized, Unavailable
from notify.protocol.limits import LIMITS
from notify.server.access import gate, lookup, oidc
from notify.server.access.oidc import Provider
from notify.server.connections import protocol, tls
from notify.server.connections.handshake import Handshake
from notify.server.connections.tls import Certificates
from notify.server.data.answer import Answer
from notify.server.serve import serve
from notify.server.settings import Settings
from notify.testing.process import ServerProcess
from tests.support.authority import Authority
from tests.support.clock import PATIENCE_SECONDS, eventually, eventually_async
from tests.support.commands import cli
from tests.support.connection import Served, head, of_uvicorn
from tests.support.groups import running
from tests.support.http import ask
from tests.support.issuer import Issuer
from tests.support.servers import GuardedInMemory


class Secured:
    """A server with TLS, mutual TLS and access, and what clients need to reach it."""

    def __init__(self, directory: Path) -> None:
        self.authority = Authority(directory, "authority")
        server = self.authority.issue("server")
        environment = {
            "NOTIFY_ACCESS": "1",
            "NOTIFY_TLS_CERTIFICATE": str(server),
            "NOTIFY_TLS_CLIENT_CA": str(self.authority.file),
        }
        self.process = ServerProcess(directory / "data", environment=environment, ca=self.authority.file).start()
        self.url = self.process.url
        self.admin = (directory / "data" / "admin.token").read_text().strip()

    def context(self, certificate: Path | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.authority.file))
        if certificate is not None:
            context.load_cert_chain(certificate)
        return context

    def ask(
        self, method: str, path: str, body: Any = None, token: str | None = None, certificate: Path | None = None
    ) -> tuple[int, Any]:
        """Send a request, and again after a 503, which a slow machine answers to an unknown token; the answer."""

        def answer() -> tuple[int, Any] | None:
            status, said = ask(self.url, method, path, body, token, tls=self.context(certificate))
            return None if status == 503 else (status, said)

        answered = eventually(answer, f"an answer to {method} {path}")
        assert answered is not None
        return answered


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    made = Secured(tmp_path_factory.mktemp("tls"))
    yield made
    made.process.stop()


def test_over_tls_tokens_count_and_plain_http_is_refused(secured: Secured, unique: str) -> None:
    assert secured.url.startswith("https://")
    assert secured.ask("GET", "/v1/admin/topics", token=secured.admin)[0] == 200
    assert secured.ask("GET", "/v1/admin/topics")[0] == 401
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        urllib.request.urlopen(secured.url + "/livez", timeout=PATIENCE_SECONDS, context=ssl.create_default_context())
    with pytest.raises((OSError, urllib.error.URLError)):  # no plain HTTP on the same port
        urllib.request.urlopen(secured.url.replace("https", "http") + "/livez", timeout=PATIENCE_SECONDS)
    with pytest.raises(urllib.error.URLError):
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.load_verify_locations(secured.authority.file)
        with pytest.deprecated_call():
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        urllib.request.urlopen(secured.url + "/livez", timeout=PATIENCE_SECONDS, context=old)


@pytest.mark.parametrize(
    ("scheme", "authority", "said"),
    [
        ("https", False, "name the authority of its certificate in NOTIFY_CA"),
        ("http", False, "if it speaks TLS, write https://"),
        ("https", True, "take it from NOTIFY_TOKEN or NOTIFY_TOKEN_FILE"),
    ],
)
def test_the_error_names_what_a_connection_lacks(
    secured: Secured, scheme: str, authority: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NOTIFY_CA", "NOTIFY_TOKEN", "NOTIFY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    if authority:
        monkeypatch.setenv("NOTIFY_CA", str(secured.authority.file))
    code, shown = cli("topic", "list", "--url", secured.url.replace("https", scheme))
    assert code == 2 and said in shown["text"]


def test_a_client_certificate_stands_for_its_principal(secured: Secured, unique: str) -> None:
    certificate = secured.authority.issue(unique)
    message = {"messages": [{"topic": unique, "body": "x"}]}
    assert secured.ask("POST", "/v1/messages", message, certificate=certificate)[0] == 401  # no credential yet
    credential = {"name": "shop", "kind": "certificate", "subject": unique, "rights": [f"publish:{unique}"]}
    assert secured.ask("POST", "/v1/admin/credentials", credential | {"reason": "r"}, secured.admin)[0] == 200
    status, answer = secured.ask("POST", "/v1/messages", message, certificate=certificate)
    assert (status, answer["items"][0]["status"]) == (200, 201)
    assert secured.ask("GET", "/v1/admin/topics", certificate=certificate)[0] == 403
    twice = secured.ask("POST", "/v1/admin/credentials", credential | {"reason": "r"}, secured.admin)
    assert twice[1]["code"] == "in_use"
    stranger = Authority(secured.authority.directory, "stranger").issue(unique + "x")
    with pytest.raises(OSError):
        secured.ask("POST", "/v1/messages", message, certificate=stranger)


def test_who_is_refused_is_disconnected(secured: Secured) -> None:
    """A refused client is disconnected before its body arrives: TLS cannot close one direction alone."""
    parts = urlsplit(secured.url)
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=PATIENCE_SECONDS) as plain:
        with secured.context().wrap_socket(plain, server_hostname=parts.hostname) as connection:
            connection.sendall(b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 8000000\r\n\r\n{")
            answer = b""
            while part := connection.recv(4096):
                answer += part
    assert answer.startswith(b"HTTP/1.1 401 ") and b"connection: close\r\n" in answer


def test_the_sdk_over_tls(secured: Secured, unique: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with TransactionProducer(secured.url, group=unique, token=secured.admin, tls=secured.context()) as producer:
        with pytest.raises(Forbidden, match="publish"):  # the first token has `admin`, and no right to publish
            producer.publish(Message(unique, "x"))
    body = {"name": "sdk", "rights": ["publish", "check"], "reason": "r"}
    token = secured.ask("POST", "/v1/admin/credentials", body, secured.admin)[1]["token"]
    monkeypatch.setenv("NOTIFY_TOKEN", token)
    monkeypatch.setenv("NOTIFY_CA", str(secured.authority.file))
    with TransactionProducer(secured.url, group=unique) as producer:
        assert producer.publish(Message(unique, "x"))
    monkeypatch.setenv("NOTIFY_CA", "/nowhere")
    with pytest.raises(InvalidRequest, match="NOTIFY_CA"), TransactionProducer(secured.url, group=unique) as producer:
        producer.publish(Message(unique, "x"))


def test_a_handshake_has_a_place_among_the_connections(tmp_path: Path) -> None:
    """A connection in its handshake counts among the connections. Silent strangers took every open file."""
    most, operators, strangers = 8, LIMITS.operator_connections, 100
    authority = Authority(tmp_path, "authority")
    environment = {"NOTIFY_TLS_CERTIFICATE": str(authority.issue("server")), "NOTIFY_CONNECTIONS": str(most)}
    server = ServerProcess(tmp_path / "data", environment=environment, ca=authority.file).start()
    context = ssl.create_default_context(cafile=str(authority.file))
    parts = urlsplit(server.url)

    def connections() -> float:
        text = str(ask(server.url, "GET", "/metrics", tls=context)[1])
        (line,) = [line for line in text.splitlines() if line.startswith("notify_connections ")]
        return float(line.split()[1])

    try:
        assert connections() == 1
        with contextlib.ExitStack() as silent:
            for _ in range(most // 2):
                silent.enter_context(socket.create_connection((parts.hostname or "", parts.port or 0)))
            eventually(lambda: connections() == 1 + most // 2, "handshakes to be counted")
            for _ in range(strangers):
                silent.enter_context(socket.create_connection((parts.hostname or "", parts.port or 0)))
            assert connections() <= most + operators
        eventually(lambda: connections() == 1, "their places to be free again")
        # A client that sends no handshake is disconnected, too.
        with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=PATIENCE_SECONDS) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                while plain.recv(4096):
                    pass
        eventually(lambda: connections() == 1, "the place to be free again")
    finally:
        server.stop()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_unread_answers_count_over_tls_too(
    tmp_path: Path, new_loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """30 clients that read nothing held 470 MB for as long as they liked: nobody was told that they do not read."""
    authority, size = Authority(tmp_path, "authority"), 8 << 20
    monkeypatch.setattr(protocol, "WRITE_SECONDS", 10 * PATIENCE_SECONDS)
    certificate = authority.issue("server")
    of_server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    of_server.load_cert_chain(certificate)
    of_client = ssl.create_default_context(cafile=str(authority.file))

    async def large(request: Any) -> Answer:
        return Answer(200, "text/plain", bytes(size))

    async def run() -> None:
        app = Served().protocol.app
        app.data = SimpleNamespace(answer=large)  # type: ignore[assignment]

        async def never(scope: Any, receive: Any, send: Any) -> None:
            raise AssertionError("a data route does not pass ASGI")

        for name in ("access", "settings", "data", "budget", "connections"):
            setattr(never, name, getattr(app, name))

        def connection() -> Handshake:
            made = Handshake(of_server, **of_uvicorn(never))
            made._protocol.app = app
            return made

        loop = asyncio.get_running_loop()
        listening, slow = socket.create_server(("127.0.0.1", 0)), socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 256 << 10)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 256 << 10)
        slow.setblocking(False)
        serving = await loop.create_server(connection, sock=listening)
        await loop.sock_connect(slow, listening.getsockname())
        reader, writer = await asyncio.open_connection(sock=slow, ssl=of_client, server_hostname="127.0.0.1")
        for _ in range(2):
            writer.write(head("known", 2) + b"{}")
            await eventually_async(lambda: app.budget.known.total > 1 << 20, "the answer to wait for its reader")
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(size)
            await eventually_async(lambda: app.budget.known.total == 0, "the answer to be read")
        writer.close()
        serving.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())


def test_a_certificate_is_renewed_without_a_restart(tmp_path: Path) -> None:
    """New connections get the new certificate, open ones continue; a file that is no certificate changes nothing."""
    authority, other = Authority(tmp_path, "first"), Authority(tmp_path, "second")
    file = tmp_path / "server.pem"
    file.write_bytes(authority.issue("one").read_bytes())
    settings = Settings(tls_certificate=str(file), access=True)
    certificates = Certificates(settings)
    listening = socket.create_server(("127.0.0.1", 0))

    def issuer() -> str:
        """The issuer of the certificate that a new connection gets."""
        with socket.create_connection(listening.getsockname()) as plain:
            accepted, _ = listening.accept()
            serving = threading.Thread(target=_shake_hands, args=(certificates.context, accepted))
            serving.start()
            trusting = ssl.create_default_context(cafile=str(authority.file))
            trusting.load_verify_locations(other.file)
            with trusting.wrap_socket(plain, server_hostname="127.0.0.1") as connection:
                shown: Any = connection.getpeercert()
            serving.join()
        return str(dict(pair[0] for pair in shown["issuer"])["commonName"])

    with listening:
        assert issuer() == "first"
        file.write_text("this is no certificate")
        certificates.look()
        assert issuer() == "first"
        file.write_bytes(other.issue("two").read_bytes())
        certificates.look()
        assert issuer() == "second"


def test_a_new_certificate_is_loaded_between_handshakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop loads it, as it shakes hands. Another thread did: a handshake at that moment failed or crashed."""
    monkeypatch.setattr(tls, "LOOK_SECONDS", 0.01)
    authority, file = Authority(tmp_path, "authority"), tmp_path / "server.pem"
    file.write_bytes(authority.issue("one").read_bytes())
    certificates = Certificates(Settings(tls_certificate=str(file), access=True))
    load, threads = certificates.context.load_cert_chain, []

    def noted(*arguments: Any) -> None:
        threads.append(threading.get_ident())
        load(*arguments)

    monkeypatch.setattr(certificates.context, "load_cert_chain", noted)

    async def run() -> None:
        following = asyncio.create_task(certificates.follow())
        file.write_bytes(authority.issue("two").read_bytes())
        await eventually_async(lambda: threads, "the certificate to be loaded")
        following.cancel()

    asyncio.run(run())
    assert threads == [threading.get_ident()]


def _shake_hands(context: ssl.SSLContext, accepted: socket.socket) -> None:
    with context.wrap_socket(accepted, server_side=True) as connection:
        connection.recv(1)


@pytest.mark.long
def test_a_server_takes_its_new_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    file = tmp_path / "server.pem"
    file.write_bytes(authority.issue("one").read_bytes())
    server = ServerProcess(
        tmp_path / "data", flags=["--access", "--tls-certificate", str(file)], ca=authority.file
    ).start()
    place = urlsplit(server.url)

    def shown() -> str:
        return ssl.get_server_certificate((place.hostname or "", place.port or 0))

    try:
        before = shown()
        file.write_bytes(authority.issue("two").read_bytes())
        eventually(lambda: shown() != before, "the new certificate")
    finally:
        server.stop()


def test_files_that_are_no_certificate_are_refused(tmp_path: Path) -> None:
    for fields in (
        {"tls_certificate": "/nowhere.pem"},
        {"tls_certificate": __file__},
        {"tls_key": "/nowhere.pem"},
        {"tls_client_ca": "/nowhere.pem"},
    ):
        with pytest.raises(InvalidRequest, match=r"TLS|tls_certificate"):
            serve(Settings(data_dir=str(tmp_path / "d"), **fields))


# --- an identity provider -------------------------------------------------------------------------------------


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises time limits, so that the provider's answers come in time on a slow machine."""
    monkeypatch.setattr(oidc, "FETCH_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(gate, "PROVIDER_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(lookup, "WAIT_SECONDS", PATIENCE_SECONDS)


@pytest.mark.usefixtures("patience")
def test_tokens_of_a_provider(issuer: Issuer) -> None:
    with GuardedInMemory(oidc_issuer=issuer.url) as guarded:

        def status(token: str, path: str = "/v1/admin/topics") -> int:
            return ask(guarded.url, "GET", path, token=token)[0]

        assert status(issuer.token(notify_rights=["view"])) == 200
        assert status(issuer.token(notify_rights="view publish:x")) == 200
        assert status(issuer.token()) == 403  # known, and without rights
        body = {"name": "clerk", "kind": "subject", "subject": "person", "rights": ["view"], "reason": "r"}
        assert ask(guarded.url, "POST", "/v1/admin/credentials", body, guarded.admin)[0] == 200
        assert status(issuer.token(jti="another")) == 200  # the credential of its subject has the right
        stranger = rsa.generate_private_key(65537, 2048)
        public = issuer.key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        view: dict[str, Any] = {"notify_rights": ["view", "admin"]}
        refused = {
            "expired": issuer.token(exp=int(time.time()) - 60, **view),
            "of another audience": issuer.token(aud="other", **view),
            "of another issuer": issuer.token(iss="http://127.0.0.1:1", **view),
            "signed by another": issuer.token(stranger, **view),
            "without a subject": issuer.token(sub=None, **view),
            "without an end": issuer.token(exp=None, **view),
            "unsigned": issuer.token("", "none", **view),
            "a public key as a secret": forged(issuer, public, view),
        }
        assert {name: status(token) for name, token in refused.items()} == dict.fromkeys(refused, 401)
        # Data routes verify the token beside the loop.
        token = issuer.token(notify_rights=["publish:orders"], sub="service")
        messages = {"messages": [{"topic": t, "body": "x"} for t in ("orders", "other")]}
        _, answer = ask(guarded.url, "POST", "/v1/messages", messages, token)
        assert [item["status"] for item in answer["items"]] == [201, 403]
        assert ask(guarded.url, "POST", "/v1/messages", messages, refused["unsigned"])[0] == 401


def forged(issuer: Issuer, public: bytes, claims: dict[str, Any]) -> str:
    """A token signed with HS256 and the public key as the secret, which PyJWT refuses to make."""

    def part(value: Any) -> bytes:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=")

    fields = {"iss": issuer.url, "aud": "notify", "sub": "person", "exp": int(time.time()) + 60} | claims
    head = part({"alg": "HS256", "typ": "JWT", "kid": "k1"}) + b"." + part(fields)
    proof = base64.urlsafe_b64encode(hmac.new(public, head, hashlib.sha256).digest()).rstrip(b"=")
    return (head + b"." + proof).decode()


def test_a_provider_that_is_away_lets_nobody_in(issuer: Issuer) -> None:
    with pytest.raises(Unavailable, match="cannot be read"):
        Provider("http://127.0.0.1:1", "notify", "notify_rights").fetch()
    with pytest.raises(Unauthorized, match="key"):
        Provider(issuer.url, "notify", "notify_rights").verify(issuer.token())
    with pytest.raises(InvalidRequest, match="https"):
        Provider("http://example.org", "notify", "notify_rights")
    with pytest.raises(Unauthorized):
        Provider(issuer.url, "notify", "notify_rights").verify("not.a.token")


def test_a_malformed_token_is_refused_without_a_key(issuer: Issuer) -> None:
    provider = Provider(issuer.url, "notify", "notify_rights")
    assert provider.key_name(issuer.token()) == "k1"
    assert provider.key_name(issuer.token(aud=["other", "notify"], iss=issuer.url + "/")) == "k1"
    for wrong in (
        issuer.token(iss="http://127.0.0.1:1"),
        issuer.token(iss=None),
        issuer.token(aud="other"),
        issuer.token(exp=int(time.time()) - 60),
        issuer.token(exp=None),
        issuer.token("", "none"),
        issuer.token(padding="x" * 20_000),
        "a.b.c",
        "a.b",
        "W10.W10.x",
        "." * 100,
        base64.urlsafe_b64encode(b"[" * 6000).decode() + ".e30.x",
        issuer.token().replace(".", "", 1),
    ):
        with pytest.raises(Unauthorized):
            provider.key_name(wrong)


@pytest.mark.long
def test_a_client_goes_on_with_renewed_files(tmp_path: Path, unique: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Authority, server and client get new files while both run; once the old connections are gone, a producer and a
    consumer that had read their files at the start got in no more."""
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    server_file, authority_file, client_file = (tmp_path / name for name in ("server.pem", "ca.pem", "client.pem"))

    def renew(authority: Authority) -> None:
        for file, content in (
            (server_file, authority.issue("server")),
            (authority_file, authority.file),
            (client_file, authority.issue(unique)),
        ):
            (tmp_path / "next").write_bytes(content.read_bytes())
            os.replace(tmp_path / "next", file)

    renew(old)
    environment = {
        "NOTIFY_ACCESS": "1",
        "NOTIFY_TLS_CERTIFICATE": str(server_file),
        "NOTIFY_TLS_CLIENT_CA": str(authority_file),
        "NOTIFY_CREATE_TOPICS": "1",
    }
    server = ServerProcess(tmp_path / "data", environment=environment, ca=authority_file).start()
    admin_token = (tmp_path / "data" / "admin.token").read_text().strip()
    rights = [f"{right}:{unique}" for right in ("publish", "consume")]
    credential = {"name": "shop", "kind": "certificate", "subject": unique, "rights": rights, "reason": "r"}
    trusting = ssl.create_default_context(cafile=str(authority_file))
    assert ask(server.url, "POST", "/v1/admin/credentials", credential, admin_token, tls=trusting)[0] == 200
    monkeypatch.delenv("NOTIFY_TOKEN", raising=False)
    monkeypatch.setenv("NOTIFY_CA", str(authority_file))
    monkeypatch.setenv("NOTIFY_CERTIFICATE", str(client_file))
    consumer = Consumer(server.url, group=unique)
    handled: list[str] = []

    @consumer.subscribe(unique, start="earliest")
    def on_message(message: Any) -> None:
        handled.append(message.text)

    def lag() -> int:
        group = ask(server.url, "GET", f"/v1/admin/groups/{unique}", None, admin_token, tls=trusting)[1]
        return sum(queue["lag"] for queue in group["queues"])

    try:
        with running(consumer), TransactionProducer(server.url, group=unique) as producer:
            producer.publish(Message(unique, "before"))
            eventually(lambda: handled == ["before"], "the first message")
            eventually(lambda: lag() == 0, "its acknowledgement")  # otherwise it comes again after the kill
            renew(new)
            server.kill()  # and with it the connections
            server._tls = ssl.create_default_context(cafile=str(new.file))
            server.start()
            producer.publish(Message(unique, "after"))
            eventually(lambda: handled == ["before", "after"], "the second message")
    finally:
        server.stop()
