"""Finds out why no broker answers: the address, TLS, or the login. Kafka's client only says that there is no answer.

While the client tries again, it reports the reason to a callback or in its log. So the brokers are asked again by a
separate client whose callback and log are read.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import socket
import ssl
import time
from collections.abc import Mapping

from confluent_kafka import KafkaError, KafkaException

from notify.errors import InvalidRequest, NotifyError, Unauthorized, Unavailable
from notify.kafka.cluster import Cluster

LOOK_SECONDS = 5.0
"""How long a broker may take before it counts as silent. A refused login is reported within one second."""
STEP_SECONDS = 0.5
TLS_SECONDS = 3.0
LOGIN = frozenset(
    (KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED, KafkaError.UNSUPPORTED_SASL_MECHANISM)
)
TELLING = LOGIN | {KafkaError._SSL, KafkaError._RESOLVE, KafkaError._TRANSPORT}
"""Errors that contain a reason; that all brokers are down is not a reason."""
BROKER_SETTING = "broker_setting"
"""The code of an error about a setting of the brokers, which may be changed again."""
SETTINGS_OF_BROKERS: Mapping[int, str] = {
    KafkaError.OFFSET_METADATA_TOO_LARGE: "allows too little metadata with a group's offsets; set "
    "offset.metadata.max.bytes of the brokers to 4096, their default, or more",
    KafkaError.INVALID_SESSION_TIMEOUT: "lets no consumer join for 6 s, after which a killed one is replaced; set "
    "group.min.session.timeout.ms of the brokers to 6000, their default, or less",
    KafkaError.INVALID_TRANSACTION_TIMEOUT: "takes no transactions of a minute; set transaction.max.timeout.ms of the "
    "brokers to 60000 or more (their default is 900000)",
    KafkaError.GROUP_MAX_SIZE_REACHED: "lets no more consumers join this group; set group.max.size of the brokers to "
    "more, or stop some of them",
}
"""Errors that a setting of the brokers causes, and its remedy."""
RUNNING = "; is it running there?"
_TLS_LIBRARY = "SSL routines"
_LOG_INFO = 6
_MECHANISMS = re.compile(r"supported mechanisms: ?([A-Z0-9, -]*)")
_SENT_TO = re.compile(r"(?:\w+://)?([^/\s]+)/\S+: ")
WHERE = "in the URL, or in the file that NOTIFY_KAFKA_SETTINGS names"


def why_unreachable(cluster: Cluster, seconds: float = LOOK_SECONDS) -> NotifyError | None:
    """Ask the brokers again; an error with the reason why they do not answer, and the remedy. None: they answer, also
    at the addresses that they direct clients to.

    The error is Unauthorized if somebody must change a setting first, else Unavailable. Raises InvalidRequest for
    settings that Kafka's client refuses.
    """
    answer = _asked(cluster, seconds)
    if isinstance(answer, NotifyError):
        return answer
    asked = cluster.brokers.split(",")
    for address in answer:
        if address not in asked and (why := why_silent(cluster, address, seconds)) is not None:
            return why
    return None


def why_silent(cluster: Cluster, address: str, seconds: float = LOOK_SECONDS) -> NotifyError | None:
    """An error if no broker answers at an address (`host:port`) that the brokers direct clients to. None: one does."""
    answer = _asked(dataclasses.replace(cluster, brokers=address), seconds)
    if not isinstance(answer, NotifyError):
        return None
    return type(answer)(_directed(address, str(answer).removesuffix(RUNNING)))


def _directed(address: str, why: str) -> str:
    return (
        f"Kafka directs clients to {address}: {why}. Start that broker, or set its advertised.listeners to what "
        "clients can reach"
    )


def _asked(cluster: Cluster, seconds: float) -> NotifyError | list[str]:
    """The addresses that the brokers direct clients to, or why they do not answer; see `why_unreachable`."""
    heard = _Heard()
    admin = cluster.admin({"error_cb": heard.error, "logger": heard.log, "log_level": _LOG_INFO})
    deadline = time.monotonic() + seconds
    while True:
        try:
            listed = admin.list_topics(timeout=STEP_SECONDS)
            return [f"{broker.host}:{broker.port}" for broker in listed.brokers.values()]
        except KafkaException as raised:
            last: KafkaError = raised.args[0]
        admin.poll(0)
        if heard.reason is not None and refuses(heard.reason):
            return refusal(heard.reason, cluster)
        if time.monotonic() > deadline or heard.reason is not None or heard.closed:
            return _unreachable(cluster, heard, last)


def refuses(error: KafkaError) -> bool:
    """Whether a broker refuses the login, or TLS fails; `refusal` gives the reason."""
    return error.code() in LOGIN or _is_of_tls(error)


def refusal(error: KafkaError, cluster: Cluster) -> Unauthorized:
    """The error for a login or a TLS handshake that failed."""
    text = error.str()
    if not _is_of_tls(error):
        return Unauthorized(_login(cluster, text))
    sent_to = _SENT_TO.match(text)
    address = sent_to[1] if sent_to else cluster.brokers.partition(",")[0]
    return Unauthorized(f"TLS with Kafka at {address} fails: {_tls(cluster, address) or _bare(text)}")


def bad_setting(error: KafkaError, cluster: Cluster) -> InvalidRequest | None:
    """The error for a setting of the brokers that Notify cannot work with, with the remedy; None: it is another one."""
    remedy = SETTINGS_OF_BROKERS.get(error.code())
    return None if remedy is None else InvalidRequest(f"Kafka at {cluster.brokers} {remedy}", BROKER_SETTING)


def _is_of_tls(error: KafkaError) -> bool:
    """Whether TLS failed. Kafka's client reports a failure in a handshake's first step as a transport error."""
    return error.code() == KafkaError._SSL or (error.code() == KafkaError._TRANSPORT and _TLS_LIBRARY in error.str())


def _login(cluster: Cluster, text: str) -> str:
    mechanism = cluster.settings.get("sasl.mechanism") or cluster.settings.get("sasl.mechanisms", "GSSAPI")
    offered = _MECHANISMS.search(text)
    at = f"Kafka at {cluster.brokers}"
    if offered is not None and offered[1].strip():
        return f"{at} has no login by {mechanism}: set sasl.mechanism to {offered[1].strip()} {WHERE}"
    if offered is not None:
        return f"{at} asks for no login: leave the sasl settings out, and set security.protocol to PLAINTEXT or SSL"
    user = cluster.settings.get("sasl.username", "")
    return (
        f"{at} refuses the login of {user!r} by {mechanism}: set sasl.username, sasl.password and sasl.mechanism "
        f"{WHERE} ({_bare(text)})"
    )


def _tls(cluster: Cluster, address: str) -> str:
    """The fault of a broker's certificate, which Python reports in more detail than Kafka's client; "": unknown."""
    host, _, port = address.rpartition(":")
    settings = cluster.settings
    try:
        context = ssl.create_default_context(cafile=settings.get("ssl.ca.location"), cadata=settings.get("ssl.ca.pem"))
        context.check_hostname = settings.get("ssl.endpoint.identification.algorithm", "https") != "none"
        with socket.create_connection((host, int(port)), TLS_SECONDS) as connection:
            context.wrap_socket(connection, server_hostname=host).close()
    except ssl.SSLCertVerificationError as error:
        if "match" in error.verify_message:
            return (
                f"the broker's certificate is for another name than {host!r}: give the brokers by the names in their "
                "certificates, in the URL and in advertised.listeners"
            )
        return (
            f"{error.verify_message}: set ssl.ca.location {WHERE} to the file of the authority that signed the "
            "brokers' certificates"
        )
    except (OSError, ValueError):
        pass  # the fault is not in the certificate, and Kafka's client reports it
    return ""


def _unreachable(cluster: Cluster, heard: _Heard, last: KafkaError) -> Unavailable:
    protocol = cluster.settings.get("security.protocol", "PLAINTEXT").upper()
    at = f"Kafka at {cluster.brokers} does not answer"
    reason = heard.reason.str() if heard.reason is not None else ""
    text = reason or heard.closed
    # The client says the second where the broker closes before the handshake is over.
    if "SSL handshake failed" in text or "SSL connection closed by peer" in reason:
        return Unavailable(
            f"{at} to TLS: it closes the connection, as a listener without TLS does; look whether this is the port of "
            f"the listener for {protocol}, or set security.protocol to another"
        )
    if heard.closed and heard.reason is None:
        wanted = "SASL_SSL or SSL" if protocol in ("PLAINTEXT", "SASL_PLAINTEXT") else "SASL_SSL, with a login"
        return Unavailable(
            f"{at} to {protocol}: it closes the connection, as a listener of another protocol does; look whether this "
            f"is the right port, and whether security.protocol should be {wanted}"
        )
    sent_to = _SENT_TO.match(reason)
    if sent_to is not None and sent_to[1] not in cluster.brokers.split(","):
        return Unavailable(_directed(sent_to[1], _bare(text)))
    return Unavailable(f"{at}: {_bare(text or last.str())}{RUNNING}")


def _bare(text: str) -> str:
    """The client's text without the address before it and the state after it."""
    return re.sub(r" \(after [^)]*\)$", "", _SENT_TO.sub("", text, count=1)).strip()


class _Heard:
    """A client's reports: `reason`, the first error with a reason; `closed`, that a broker closed the connection."""

    def __init__(self) -> None:
        self.reason: KafkaError | None = None
        self.closed = ""
        self.log = logging.Logger("notify.kafka.diagnosis", logging.DEBUG)
        self.log.addHandler(_Lines(self))

    def error(self, error: KafkaError) -> None:
        if self.reason is None and error.code() in TELLING:
            self.reason = error


class _Lines(logging.Handler):
    """Reads the lines of the client's log."""

    def __init__(self, heard: _Heard) -> None:
        super().__init__()
        self._heard = heard

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "Disconnected" in text:
            self._heard.closed = text.rpartition("]: ")[2]
