"""Settings of an operator. A flag goes before the environment, the environment before the file.

Each setting is one field below with its paragraph, unit, bound and default; its environment name is `NOTIFY_` and
the field's name in capitals. docs/reference/settings.md is generated from here and tested to be complete.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from notify.errors import InvalidRequest
from notify.limits import LIMITS


def _setting(default: Any, doc: str, low: float | None = None, high: float | None = None, **more: bool) -> Any:
    """`live`: it may change while servers run; `secret`: never shown."""
    return field(
        default=default, metadata={"doc": doc, "low": low, "high": high, "live": False, "secret": False} | more
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything `notify serve` can be told."""

    host: str = _setting(
        "127.0.0.1", "The address to listen on. While `access` is off, only loopback addresses are served."
    )
    port: int = _setting(
        7400, "The TCP port to listen on; 0 takes a free one, which the first log line names.", 0, 65535
    )
    data_dir: str = _setting(
        "./notify-data", "The directory of the log; made if it is missing, readable by its owner only."
    )
    storage: str = _setting(
        "",
        "Where transactions are kept. Empty: in the log under `data_dir`, with the queues. Else a database "
        "(PostgreSQL, MySQL, MariaDB or SQLite as an SQLAlchemy URL; several as `name=URL name=URL`, one a shard): "
        "then this server is stateless, and a bridge or relay moves what is committed to a queue server.",
        secret=True,
    )
    sql_writers: int = _setting(
        2, "How many connections write to each database of `storage`; each carries the requests of many callers.", 1, 64
    )
    registry: str = _setting(
        "",
        "The database in which servers, bridges and consumers find each other; empty: the first one of `storage`, and "
        "without that none.",
        secret=True,
    )
    roles: str = _setting(
        "transactions,queue",
        "What this server announces in the registry, of `transactions` and `queue`. With a database as `storage` it is "
        "`transactions`.",
    )
    url: str = _setting("", "The address that the registry hands out for this server; empty: `http://host:port`.")
    room: str = _setting(
        "", "Where this server stands (a data centre, a zone): clients with the same label prefer it. Empty: nowhere."
    )
    shard: str = _setting(
        "main",
        "The name of this log or database among several. Outcomes name the shard that stored their half.",
    )
    create_topics: bool = _setting(
        True, "Whether a topic is made when a message for it first comes; otherwise that is a 404.", live=True
    )
    segment_bytes: int = _setting(256 << 20, "The size at which a segment of the log ends, in bytes.", 1 << 20, 4 << 30)
    retention_seconds: float = _setting(
        7 * 86_400.0,
        "How long messages and ids are kept, in seconds from the commit; a topic may keep its own longer. What a group "
        "has not settled, and what is undecided or delayed, is kept until it is.",
        60,
        3650 * 86_400.0,
        live=True,
    )
    retention_bytes: int = _setting(
        0,
        "How large the log may grow, in bytes; 0: no bound. Beyond it the oldest segment goes before its time, but for "
        "what a group has not settled, what is undecided or delayed, and the ids.",
        0,
        1 << 50,
        live=True,
    )
    check_attempts: int = _setting(
        15, "How many answered checks without an outcome park a transaction.", 1, 1000, live=True
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
        "How many connections there may be at once, in all; beyond it 503 `too_many_connections`. It is less where the "
        "limit of open files is: three quarters of that.",
        8,
        1_000_000,
    )
    access: bool = _setting(
        False,
        "Whether who asks must show a token or certificate, and may only do what it has a right to. Off: everything is "
        "allowed, and only loopback is served.",
    )
    tls_certificate: str = _setting("", "The server's certificate chain, a PEM file; empty: no TLS.")
    tls_key: str = _setting("", "The certificate's private key, a PEM file; empty: it is in `tls_certificate`.")
    tls_client_ca: str = _setting(
        "",
        "Mutual TLS: a PEM file with the authorities whose certificates clients may show, instead of a token. A client "
        "without a certificate needs a token.",
    )
    plaintext: bool = _setting(
        False,
        "Whether tokens may come over a network without TLS: only behind a proxy that ends it, and whose "
        "`X-Forwarded-Proto` is believed. Without this setting an address other than loopback needs `tls_certificate`.",
    )
    oidc_issuer: str = _setting(
        "",
        "An OpenID Connect issuer (https) whose bearer tokens are taken, beside the server's own; its keys are found "
        "through its discovery document. Empty: none.",
    )
    oidc_audience: str = _setting("notify", "The audience (`aud`) that such a token must name.")
    oidc_rights_claim: str = _setting(
        "notify_rights",
        "The claim of such a token that lists rights; besides them, those of the credential made for its subject hold.",
    )
    principal_requests: float = _setting(
        0.0, "Requests a second of one principal that has no rate of its own; 0: no bound.", 0, 1e9, live=True
    )
    principal_polls: int = _setting(
        1000,
        "Polls of one principal that may wait at once, where it has no number of its own.",
        1,
        1_000_000,
        live=True,
    )
    alarm_every_seconds: float = _setting(
        5.0, "How often a server looks for what is worth an alarm, in seconds.", 0.1, 300, live=True
    )
    alarm_doubt_seconds: float = _setting(
        300.0,
        "How long a transaction may be in doubt before an alarm, in seconds; 0: no such alarm.",
        0,
        86_400 * 40,
        live=True,
    )
    alarm_parked: int = _setting(1, "How many parked transactions raise an alarm; 0: none does.", 0, 1000, live=True)
    alarm_no_consumer_seconds: float = _setting(
        60.0,
        "How long a group with messages to receive may be without a consumer before an alarm, in seconds; 0: no such "
        "alarm.",
        0,
        86_400 * 40,
        live=True,
    )
    alarm_lag_growing_seconds: float = _setting(
        300.0,
        "For how long a group's lag may rise steadily before an alarm, in seconds; 0: no such alarm.",
        0,
        86_400,
        live=True,
    )
    alarm_disk_share: float = _setting(
        0.9, "How full the log's disk may be before an alarm, as a share; 0: no such alarm.", 0, 1, live=True
    )
    alarm_bridge_seconds: float = _setting(
        30.0, "How long a bridge may be silent before an alarm, in seconds; 0: no such alarm.", 0, 86_400, live=True
    )
    alarm_webhook: str = _setting(
        "", "Where alarms are posted when they are raised and cleared; its host must be in `webhook_hosts`.", live=True
    )
    tracing: bool = _setting(
        False,
        "Whether this server adds spans (half, check, deliver, append) to the traces that messages carry, and exports "
        "them as OpenTelemetry's environment variables say (`OTEL_EXPORTER_OTLP_ENDPOINT`). Needs the extra `otel`.",
    )
    webhook_hosts: str = _setting(
        "", "`host:port`, separated by commas: where webhooks may go. Nowhere else, and redirects are not followed."
    )
    webhook_secret: str = _setting("", "What webhooks are signed with (HMAC-SHA-256).", secret=True)


def environment_name(name: str) -> str:
    return "NOTIFY_" + name.upper()


def load(
    flags: dict[str, Any] | None = None, file: Path | None = None, environ: dict[str, str] | None = None
) -> Settings:
    """Settings from flags (None: not given), the environment and a TOML file.

    Raises InvalidRequest for an unknown name, a value of the wrong type or one beyond its bound.
    """
    environ = dict(os.environ) if environ is None else environ
    fields = {f.name: f for f in dataclasses.fields(Settings)}
    values: dict[str, Any] = {}
    if file is not None:
        try:
            table = tomllib.loads(file.read_text())
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise InvalidRequest(f"the settings file {file} cannot be read: {error}") from None
        for name, value in table.items():
            if name not in fields:
                raise InvalidRequest(f"{file}: there is no setting {name!r}; see docs/reference/settings.md")
            values[name] = value
    for name in fields:
        text = environ.get(environment_name(name))
        if text is not None:
            values[name] = text
    values.update({k: v for k, v in (flags or {}).items() if v is not None})
    types = typing.get_type_hints(Settings)
    return Settings(**{name: _checked(fields[name], types[name], value) for name, value in values.items()})


def changed(settings: Settings, values: dict[str, Any]) -> Settings:
    """Settings with other values of what may change while a server runs.

    Raises InvalidRequest for an unknown name, one that takes a restart, or a value of the wrong type or beyond a bound.
    """
    fields = {f.name: f for f in dataclasses.fields(Settings)}
    types = typing.get_type_hints(Settings)
    found = {}
    for name, value in values.items():
        if name not in fields:
            raise InvalidRequest(f"there is no setting {name[:60]!r}; see GET /v1/admin/settings", "invalid_setting")
        if not fields[name].metadata["live"]:
            raise InvalidRequest(
                f"{name} is read when a server starts: set {environment_name(name)} and restart it", "needs_restart"
            )
        found[name] = _checked(fields[name], types[name], value)
    return dataclasses.replace(settings, **found)


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
        raise InvalidRequest(f"setting {setting.name}: {shown} is not a {kind.__name__}", "invalid_setting") from None
    low, high = setting.metadata["low"], setting.metadata["high"]
    if low is not None and not low <= value <= high:
        raise InvalidRequest(
            f"setting {setting.name} is {value}; it must be from {low:g} to {high:g}", "invalid_setting"
        )
    return value
