"""The settings of `notify serve`. A flag overrides the environment, and the environment overrides the file.

Each setting is one field of Settings with its description, unit, bounds and default. Its environment variable is
`NOTIFY_` and the field's name in capitals. The table in docs/reference.md is made from these fields; a test compares
them.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from notify.errors import InvalidRequest
from notify.protocol.limits import LIMITS
from notify.protocol.workers import MOST, worker_names
from notify.runtime.environment import value_of


def _setting(default: Any, doc: str, low: float | None = None, high: float | None = None, **flags: bool) -> Any:
    """A field of Settings. `live=True`: it may change while servers run; `secret=True`: its value is never shown;
    `filled=True`: it must not be empty."""
    unset = {"live": False, "secret": False, "filled": False}
    return field(default=default, metadata={"doc": doc, "low": low, "high": high} | unset | flags)


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of a server."""

    host: str = _setting(
        "127.0.0.1",
        "The address to listen on. While `access` is off, only loopback addresses are served.",
        filled=True,
    )
    port: int = _setting(
        7400, "The TCP port to listen on; 0 takes a free one, which the first log line names.", 0, 65535
    )
    data_dir: str = _setting(
        "./notify-data",
        "The directory of the log; made if it is missing, readable by its owner only.",
        filled=True,
    )
    storage: str = _setting(
        "",
        "Where transactions are stored. Empty: in the log under `data_dir`, with the queues. Otherwise a database "
        "(PostgreSQL, MySQL, MariaDB or SQLite as an SQLAlchemy URL; several as `name=URL name=URL`, each a shard): "
        "then this server is stateless, and a bridge or relay moves committed messages to a queue server.",
        secret=True,
    )
    sql_writers: int = _setting(
        2, "How many connections write to each database of `storage`; each carries the requests of many callers.", 1, 64
    )
    registry: str = _setting(
        "",
        "The database in which servers, bridges and consumers find each other. Empty: the first database of `storage`; "
        "without `storage` there is no registry.",
        secret=True,
    )
    kafka: str = _setting(
        "",
        "A Kafka cluster (`kafka://host:port,…`) that a bridge or relay publishes to: this server shows and manages "
        "its "
        "consumer groups instead of its own queues. Without `storage` the server then takes no messages.",
        secret=True,
    )
    roles: str = _setting(
        "transactions,queue",
        "The roles that this server announces in the registry: `transactions`, `queue` or both. With a database as "
        "`storage` it is always `transactions`.",
    )
    url: str = _setting("", "The address that the registry hands out for this server; empty: `http://host:port`.")
    name: str = _setting(
        "", "What the console calls this server, such as `shop, production`. Empty: its address in the browser."
    )
    room: str = _setting(
        "",
        "A label of this server's place (a data centre, a zone): clients with the same label prefer it. Empty: none.",
    )
    shard: str = _setting(
        "main",
        "The name of this server's log or database among several. An outcome names the shard that stored its half. "
        "The data directory remembers it.",
        filled=True,
    )
    workers: int = _setting(
        1,
        "How many processes serve, each on a core and with a log of its own; they divide the keys among themselves. "
        "The data directory remembers the number. With TLS each has a port of its own, from `port` on.",
        1,
        MOST,
    )
    worker_timeout_seconds: float = _setting(
        30.0,
        "How long a worker may hang, in seconds: its event loop while it serves, the whole process while it "
        "starts. Its parent then kills it and starts it again. Time in which the parent itself did not run does not "
        "count, nor does a wait for the disk.",
        1,
        86_400,
    )
    create_topics: bool = _setting(
        True,
        "Whether the first message for a topic, or the first consumer of it, makes the topic; otherwise both are "
        "refused with 404.",
        live=True,
    )
    segment_bytes: int = _setting(
        256 << 20, "The size at which the log begins a new segment, in bytes.", 1 << 20, 4 << 30
    )
    retention_seconds: float = _setting(
        7 * 86_400.0,
        "How long messages and ids are kept, in seconds from the commit; a topic may keep its messages longer. "
        "Messages that a group has not settled, and undecided or delayed ones, are kept until they are settled.",
        60,
        3650 * 86_400.0,
        live=True,
    )
    retention_bytes: int = _setting(
        0,
        "How large the log may grow, in bytes; 0: no bound. Beyond it the oldest segment is deleted early, except for "
        "messages that a group has not settled, undecided and delayed messages, and ids.",
        0,
        1 << 50,
        live=True,
    )
    ship_to: str = _setting(
        "",
        "The object store that finished segments of the log are shipped to: `s3://bucket/prefix`, `file:///directory`, "
        "`hdfs://…`; needs the extra `ship`. Its credentials and address come from where the store's library looks for "
        "them, such as `AWS_ACCESS_KEY_ID` and `AWS_ENDPOINT_URL`. Empty: nothing is shipped.",
    )
    ship_every: float = _setting(
        60.0,
        "How often a segment is finished and shipped, in seconds. If the disk is lost, about this much of the log is "
        "lost with it. An empty segment is not finished.",
        1,
        86_400,
    )
    ship_rate: float = _setting(
        64.0,
        "The highest rate at which objects are written to the store and read back, in MiB per second. With indexes and "
        "tables the log itself is shipped at about a third of that.",
        0.1,
        100_000,
    )
    ship_keep: float = _setting(
        0.0,
        "How long the store keeps segments that retention has dropped on the server and that no message waits in, in "
        "seconds, by the time of their newest entry; at least the 7 days for which ids are known. 0: forever.",
        0,
        3.2e9,
    )
    check_attempts: int = _setting(
        15, "After how many answered checks without an outcome a transaction is parked.", 1, 1000, live=True
    )
    check_backoff_seconds: float = _setting(
        5.0, "The wait after the first answered check, in seconds; it doubles.", 0.1, 3600, live=True
    )
    check_backoff_max_seconds: float = _setting(
        60.0, "The longest wait between two checks, in seconds.", 0.1, 86_400, live=True
    )
    check_answer_seconds: float = _setting(
        10.0, "How long a poller has to answer a check before it is asked again, in seconds.", 0.5, 600, live=True
    )
    check_parked_seconds: float = _setting(
        600.0, "How often a parked transaction is still checked, in seconds.", 1, 86_400, live=True
    )
    body_timeout_seconds: float = _setting(
        10.0, "How long a client may take to send a request, in seconds.", 0.5, 600, live=True
    )
    connections: int = _setting(
        LIMITS.connections,
        "How many connections may be open at once; others are refused with 503 `too_many_connections`. If "
        "three quarters of the limit of open files are fewer, that is the bound.",
        8,
        1_000_000,
    )
    access: bool = _setting(
        False,
        "Whether a client must present a token or certificate, and may do only what its rights allow. Off: everything "
        "is allowed, and only loopback addresses are served.",
    )
    tls_certificate: str = _setting("", "The server's certificate chain, a PEM file; empty: no TLS.")
    tls_key: str = _setting("", "The certificate's private key, a PEM file; empty: the key is in `tls_certificate`.")
    tls_client_ca: str = _setting(
        "",
        "Mutual TLS: a PEM file of the authorities whose certificates clients may present instead of a token. A client "
        "without a certificate needs a token.",
    )
    plaintext: bool = _setting(
        False,
        "Whether tokens may come over a network without TLS. Only for a server behind a proxy that ends TLS; the "
        "server then trusts its `X-Forwarded-Proto`. Otherwise an address other than loopback needs `tls_certificate`.",
    )
    oidc_issuer: str = _setting(
        "",
        "An OpenID Connect issuer (https) whose bearer tokens are accepted too. Its discovery "
        "document leads to its keys. Empty: none.",
    )
    oidc_audience: str = _setting("notify", "The audience (`aud`) that such a token must name.")
    oidc_rights_claim: str = _setting(
        "notify_rights",
        "The claim of such a token that lists its rights. A credential made for the token's subject adds its rights.",
    )
    principal_requests: float = _setting(
        0.0,
        "How many requests per second a principal without a rate of its own may make; 0: no bound.",
        0,
        1e9,
        live=True,
    )
    principal_polls: int = _setting(
        1000,
        "How many polls of a principal without a number of its own may wait at once.",
        1,
        1_000_000,
        live=True,
    )
    alarm_every_seconds: float = _setting(
        5.0, "The time between two searches for reasons for an alarm, in seconds.", 0.1, 300, live=True
    )
    alarm_doubt_seconds: float = _setting(
        300.0,
        "How long a transaction may be in doubt before an alarm, in seconds; 0: no alarm.",
        0,
        86_400 * 40,
        live=True,
    )
    alarm_parked: int = _setting(1, "How many parked transactions raise an alarm; 0: no alarm.", 0, 1000, live=True)
    alarm_no_consumer_seconds: float = _setting(
        60.0,
        "How long a group with messages to receive may be without a consumer before an alarm, in seconds; 0: no alarm.",
        0,
        86_400 * 40,
        live=True,
    )
    alarm_lag_growing_seconds: float = _setting(
        300.0,
        "For how long a group's lag may rise steadily before an alarm, in seconds; 0: no alarm.",
        0,
        86_400,
        live=True,
    )
    alarm_dead_letters: int = _setting(
        1,
        "How many unresolved dead letters of a group raise an alarm; 0: no alarm.",
        0,
        1_000_000_000,
        live=True,
    )
    alarm_held_keys: int = _setting(
        1,
        "How many held keys of a group raise an alarm; 0: no alarm.",
        0,
        1_000_000_000,
        live=True,
    )
    alarm_consumer_seconds: float = _setting(
        60.0,
        "How long a consumer may be stuck or slow before an alarm, in seconds; 0: no alarm.",
        0,
        86_400 * 40,
        live=True,
    )
    alarm_disk_share: float = _setting(
        0.9, "How full the log's disk may be before an alarm, as a share; 0: no alarm.", 0, 1, live=True
    )
    alarm_bridge_seconds: float = _setting(
        30.0, "How long a bridge may be silent before an alarm, in seconds; 0: no alarm.", 0, 86_400, live=True
    )
    alarm_shipping_seconds: float = _setting(
        300.0,
        "How far the store may be behind the log, beyond `ship_every`, before an alarm, in seconds; 0: no alarm.",
        0,
        86_400 * 40,
        live=True,
    )
    alarm_webhook: str = _setting(
        "",
        "The URL that alarms are posted to when they are raised and cleared; its host must be in `webhook_hosts`.",
        live=True,
    )
    tracing: bool = _setting(
        False,
        "Whether this server adds spans (half, check, deliver, append) to the traces that messages carry, and exports "
        "them as OpenTelemetry's environment variables say (`OTEL_EXPORTER_OTLP_ENDPOINT`). Needs the extra `otel`.",
    )
    trace_url: str = _setting(
        "",
        "The address at which your tracing shows a trace, with `{trace}` for its id, such as "
        "`https://jaeger.example/trace/{trace}`: a message's page links to it. Empty: no link.",
        live=True,
    )
    webhook_hosts: str = _setting(
        "", "The hosts that webhooks may be sent to: `host:port`, separated by commas. Redirects are not followed."
    )
    webhook_secret: str = _setting("", "The key that webhooks are signed with (HMAC-SHA-256).", secret=True)

    @property
    def key_shards(self) -> tuple[str, ...]:
        """The shards among which workers divide the keys; empty if one server has all keys."""
        return worker_names(self.workers) if self.workers > 1 else ()

    @property
    def takes_messages(self) -> bool:
        """Whether producers may send to this server; False if it only shows the groups of Kafka."""
        return not self.kafka or bool(self.storage)


OTHERS = frozenset(
    {"NOTIFY_TOKEN", "NOTIFY_TOKEN_FILE", "NOTIFY_KEY", "NOTIFY_CERTIFICATE", "NOTIFY_CA", "NOTIFY_SOCKET"}
)
"""Variables that are not settings of a server, but have similar names."""
KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
"""How an error names the type of a setting."""


def environment_name(name: str) -> str:
    return "NOTIFY_" + name.upper()


def load(
    flags: dict[str, Any] | None = None, file: Path | None = None, environ: dict[str, str] | None = None
) -> Settings:
    """Load settings from flags (None: not given), the environment and a TOML file.

    Raises InvalidRequest for an unknown name, a value of the wrong type, or a value out of bounds.
    """
    environ = dict(os.environ) if environ is None else environ
    fields = {f.name: f for f in dataclasses.fields(Settings)}
    values: dict[str, Any] = {}
    if file is not None:
        try:
            table = tomllib.loads(file.read_text(encoding="utf-8-sig"))  # editors of Windows begin it with a mark
        except (OSError, ValueError) as error:  # ValueError: not TOML, or not text
            raise InvalidRequest(f"the settings file {file} cannot be read: {error}") from None
        for name, value in table.items():
            if name not in fields:
                sections = f"the file has no sections: write its settings without [{name}]"
                instead = sections if isinstance(value, dict) else _instead(name, fields)
                raise InvalidRequest(f"{file}: there is no setting {name!r}; {instead}")
            values[name] = value
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    for name in fields:
        if environment_name(name) in environ and name not in given:
            values[name] = value_of(environment_name(name), environ)
            if name == "port" and values[name].startswith("tcp://"):
                raise InvalidRequest(
                    f"NOTIFY_PORT is {values[name]!r}: Kubernetes sets it in each pod next to a Service named notify. "
                    "Set enableServiceLinks: false in the pod's specification, or NOTIFY_PORT to the port"
                )
    values.update(given)
    types = typing.get_type_hints(Settings)
    checked = {name: _checked(fields[name], types[name], value) for name, value in values.items()}
    if "data_dir" in checked:  # only a shell replaces ~, and not in --data-dir=~/notify
        checked["data_dir"] = os.path.expanduser(checked["data_dir"])
    return Settings(**checked)


def mistyped(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that set nothing because their names are misspelt, each with the probably meant name."""
    prefix, names = environment_name(""), [f.name for f in dataclasses.fields(Settings)]
    corrections = {}
    for variable in sorted(environ):
        name = variable.removeprefix(prefix).lower()
        if variable.startswith(prefix) and name not in names and variable not in OTHERS:
            meant = _meant(name, names)
            if meant:
                corrections[variable] = environment_name(meant)
    return corrections


def check_trace_url(settings: Settings) -> None:
    """Raises InvalidRequest unless the setting `trace_url` is empty, or an address with a place for the trace's id."""
    url = settings.trace_url
    if url and not (url.startswith(("http://", "https://")) and "{trace}" in url):
        raise InvalidRequest(
            f"setting trace_url is {url[:60]!r}; it must begin with http:// or https:// and contain {{trace}}",
            "invalid_setting",
        )


def _meant(name: str, names: Iterable[str]) -> str:
    """The setting with the most similar name; "" if none is similar."""
    near = difflib.get_close_matches(name, names, 1, 0.75)
    return near[0] if near else ""


def _instead(name: str, names: Iterable[str]) -> str:
    """The remedy where no setting has this name."""
    meant = _meant(name, names)
    return f"did you mean {meant}?" if meant else "`notify settings list` and docs/reference.md have all settings"


def changed(settings: Settings, values: dict[str, Any]) -> Settings:
    """A copy of `settings` with new `values` of settings that may change while a server runs.

    Raises InvalidRequest for an unknown name, a setting that needs a restart (`needs_restart`), a value of the wrong
    type, or a value out of bounds (`invalid_setting`).
    """
    fields = {f.name: f for f in dataclasses.fields(Settings)}
    types = typing.get_type_hints(Settings)
    checked = {}
    for name, value in values.items():
        if name not in fields:
            name = name[:60]
            raise InvalidRequest(f"there is no setting {name!r}; {_instead(name, fields)}", "invalid_setting")
        if not fields[name].metadata["live"]:
            raise InvalidRequest(
                f"{name} is read when a server starts: set {environment_name(name)} and restart it", "needs_restart"
            )
        checked[name] = _checked(fields[name], types[name], value)
    return dataclasses.replace(settings, **checked)


def _checked(setting: dataclasses.Field[Any], kind: type, value: Any) -> Any:
    try:
        if kind is bool and isinstance(value, str):
            value = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[value.lower()]
        elif kind is bool and not isinstance(value, bool):
            raise ValueError
        else:
            value = kind(value)
    except (KeyError, ValueError, TypeError):
        shown = "the given value" if setting.metadata["secret"] else repr(value)[:60]
        raise InvalidRequest(f"setting {setting.name}: {shown} is not {KINDS[kind]}", "invalid_setting") from None
    if setting.metadata["filled"] and not value.strip():
        raise InvalidRequest(
            f"setting {setting.name} is empty: leave it out for its default, {setting.default}", "invalid_setting"
        )
    low, high = setting.metadata["low"], setting.metadata["high"]
    if low is not None and not low <= value <= high:
        raise InvalidRequest(
            f"setting {setting.name} is {value:,}; it must be from {low:,.15g} to {high:,.15g}", "invalid_setting"
        )
    return value
