"""Writes to the server: settings, rates, credentials, alarms, jobs; and what audits and backups write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal

from notify.admin_api.declaration import AdminWrite, Body, Bounds, FanOut, Flag, Input, Instant, Write, declared
from notify.admin_api.description import Description, Rows, text
from notify.admin_api.words import count, exactly, setting
from notify.admin_api.words import job as work_of
from notify.errors import InvalidRequest
from notify.protocol.limits import instant_us
from notify.protocol.wire import instant

# A field is a row of a table: itself, its input, its flag.
# fmt: off
DAYS, MOST_DAYS = 90.0, 3650.0
"""How long a credential is valid, in days: the default, and the longest."""
LONGEST_SILENCE_SECONDS = 30 * 86_400.0
MOST_REPUBLISHED = 1000
REPORT_BYTES = 512 << 10
MOST = 1 << 53
"""The largest number of a verdict: browsers, too, count so far."""
_HOURS = Flag("For how long.", 0.02, 720, "hours", 1.0, scale=3600)
_TARGET = Flag("The alarm's target as `notify alarm list` shows it, such as a group.")


@dataclass(frozen=True, kw_only=True)
class Silenced(Write):
    target: str = declared("", "the alarm's target, such as a group; empty if it has none", max_length=255,
        input=Input(help="What the alarm is about, such as a group; empty if it has no target."), flag=_TARGET)
    seconds: float = declared(description="how long", ge=60, le=LONGEST_SILENCE_SECONDS, examples=[3600],
        input=Input("Hours", "From 0.02 to 720.", kind="hours"), flag=_HOURS)


@dataclass(frozen=True, kw_only=True)
class Unsilenced(Write):
    target: str = declared("", "the alarm's target, such as a group; empty if it has none", max_length=255,
        input=Input(), flag=_TARGET)


Rates = dict[str, Annotated[float, Bounds(gt=0, le=1e9)]]
_RATE_LINES = "NAME=RATE, one a line."


@dataclass(frozen=True, kw_only=True)
class LimitsWrite(Write):
    topics: Rates = declared({}, "messages per second that a topic accepts, by name",
        input=Input("Topics: messages per second", _RATE_LINES))
    producer_groups: Rates = declared({}, "transactions per second, by name",
        input=Input("Producer groups: transactions per second", _RATE_LINES))
    consumer_groups: Rates = declared({}, "messages per second that are delivered, by name",
        input=Input("Consumer groups: messages per second", _RATE_LINES))


@dataclass(frozen=True, kw_only=True)
class SettingsWrite(Write):
    values: dict[str, bool | int | float | str | None] = declared(
        description="by name; null: the value at the server's start", min_length=1, max_length=100)
    after: int | None = declared(None, "the revision you know; 409 if another one is newer", ge=0, le=1 << 62)


@dataclass(frozen=True, kw_only=True)
class Rollback(Write):
    to: int = declared(description="a revision; 0: the values at the servers' start", ge=0, le=1 << 62,
        input=Input("Revision", "0: the settings of the servers' start."),
        flag=Flag("The revision to return to; 0: as the servers were started.", 0, is_argument=True))


@dataclass(frozen=True, kw_only=True)
class CredentialWrite(Write):
    name: str = declared(description="the service or person that uses the credential",
        input=Input(help="A service or a person."))
    rights: list[str] = declared(description="such as publish:order.*, consume:points, view, admin", max_length=1000,
        input=Input(help="Such as publish:order.*, check:orders, consume:points@order.*, view, admin."))
    expires_in: float = declared(DAYS * 86_400, "seconds", gt=0, le=MOST_DAYS * 86_400,
        input=Input("Expires in, seconds", "Default: 90 days."))
    kind: Literal["token", "certificate", "subject"] = declared("token",
        "what the caller presents: a token, a client certificate, or a token of the identity provider", input=Input())
    subject: str | None = declared(None, "the certificate's common name, or the `sub` of the provider's token",
        max_length=255, input=Input(help="A certificate's common name, or the sub of a provider's token."))
    requests: float = declared(0, "requests per second; 0: as principal_requests says", ge=0, le=1e9)
    polls: int = declared(0, "polls that may wait; 0: as principal_polls says", ge=0, le=1_000_000)


@dataclass(frozen=True, kw_only=True)
class WebhooksWrite(Write):
    webhooks: dict[str, str] = declared(description="addresses by producer group", max_length=1000)


@dataclass(frozen=True, kw_only=True)
class Lost(Body):
    """A message to publish again. Without a topic, its content is read from the half that the server has."""

    id: str = declared()
    topic: str | None = declared(None)
    body_base64: str = declared("")
    key: str | None = declared(None)
    tag: str | None = declared(None)
    headers: dict[str, str] | None = declared(None)
    deliver_at: Instant | None = declared(None, "when to deliver it, if that is still to come")
    ttl: float | None = declared(None, "seconds from its delivery on; without a topic: the rest of the half's ttl")


@dataclass(frozen=True, kw_only=True)
class Republish(Write):
    messages: list[Lost] = declared(min_length=1, max_length=MOST_REPUBLISHED)


_Name = Annotated[str, Bounds(max_length=100)]
_NUMBER = Bounds(ge=-MOST, le=MOST)


class _AsInstant:
    """Has a text checked and written as the console formats an instant; empty text stays."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema  # only pydantic calls this

        return core_schema.no_info_after_validator_function(_instant, handler(source))


def _instant(text: str) -> str:
    try:
        return instant(instant_us("it", datetime.fromisoformat(text))) if text else ""
    except (ValueError, InvalidRequest):
        raise ValueError("it should be an instant, such as 2026-01-31T12:00:00Z") from None


InstantText = Annotated[str, _AsInstant()]


@dataclass(frozen=True, kw_only=True)
class AuditWrite(Write):
    verdict: Literal["PASS", "FINDINGS", "INCONCLUSIVE"] = declared()
    counts: dict[_Name, Annotated[int, Bounds(ge=0, le=MOST)]] = declared(description="findings by class",
        max_length=64)
    totals: dict[_Name, Annotated[int, _NUMBER] | Annotated[float, _NUMBER]] = declared(
        {}, max_length=64)
    reasons: list[Annotated[str, Bounds(max_length=1000)]] = declared([], "why a part could not be judged",
        max_length=100)
    since: InstantText = declared("", "start of the time that the audit covers, RFC 3339", max_length=40)
    until: InstantText = declared("", "end of the time that the audit covers, RFC 3339", max_length=40)
    report: str = declared("", "the report, a self-contained HTML page", max_length=REPORT_BYTES)
# fmt: on


# --- sentences --------------------------------------------------------------------------------------------------


def silence(target: str, result: Mapping[str, Any]) -> Description:
    """An alarm that is silenced or unsilenced."""
    alarm = f"Alarm {result['name']}" + (f" of {result['target']}" if result["target"] else "")
    if "who" not in result:
        return Description([f"{alarm} is no longer silenced."])
    return Description([f"{alarm} is silent until {exactly(result['until'])}. The overview still shows it."])


def set_settings(target: str, result: Mapping[str, Any]) -> Description:
    """Settings that change while servers run."""
    changes, revision = result["changes"], result["revision"]
    if all(change["from"] == change["to"] for change in changes.values()):
        same = ", ".join(f"{name} is {setting(change['to'])} already" for name, change in changes.items())
        return Description([f"Revision {revision} changes nothing: {same}."])
    cells = [[name, setting(change["from"]), setting(change["to"])] for name, change in changes.items()]
    return Description(
        [f"Revision {revision} changes these settings:"], Rows(["Setting", "Before", "From now on"], cells)
    )


def roll_back(target: str, result: Mapping[str, Any]) -> Description:
    """Settings and rates that are rolled back to an earlier revision."""
    values = result["values"] if "values" in result else result["to"]["values"]
    description = Description([f"Settings and rates become those of revision {target}."])
    if not values:
        description.sentences.append("All settings have the values that the servers were started with.")
    description.rows = Rows(["Setting", "From now on"], [[name, setting(value)] for name, value in values.items()])
    return description


_RATES = (
    ("topics", "topic", "messages per second"),
    ("producer_groups", "producer group", "transactions per second"),
    ("consumer_groups", "consumer group", "messages per second"),
)


def limit(target: str, result: Mapping[str, Any]) -> Description:
    """All rates, which replace the previous rates."""
    cells = [
        [f"{noun} {name}", f"{count(rate)} {unit}"]
        for kind, noun, unit in _RATES
        for name, rate in result[kind].items()
    ]
    if not cells:
        return Description(["From now on no name has a rate."])
    return Description(["From now on these names have a rate, and no others:"], Rows(["Name", "Rate"], cells))


def grant(target: str, result: Mapping[str, Any]) -> Description:
    """A credential that is added."""
    until = f" until {exactly(result['expires_at'])}" if result["expires_at"] else ""
    description = Description([f"{result['name']} has these rights{until}: {text(result['rights'])}."])
    if result["id"]:
        description.sentences.append(f"The credential's id is {result['id']}: it is needed to revoke the credential.")
    return description


def revoke(target: str, result: Mapping[str, Any]) -> Description:
    """A credential that is revoked."""
    return Description(
        [f"Requests with credential {result['id']} of {result['name']} are refused, at all servers within two seconds."]
    )


def cancel(target: str, result: Mapping[str, Any]) -> Description:
    """A job that is stopped."""
    done = f"{count(result['done'])} of its items are done and stay so, {count(result['failed'])} of them failed"
    return Description([f"Job {result['id']} ({work_of(result['what'])}) ends where it is: {done}."])


# fmt: off
# --- writes -----------------------------------------------------------------------------------------------------

SILENCE = AdminWrite("alarm.silence", "POST", "alarms/{name}/silence", Silenced, describe=silence,
    title="Silence an alarm",
    warning="During this time this server posts the alarm to no webhook and counts it in no metric.")
UNSILENCE = AdminWrite("alarm.unsilence", "POST", "alarms/{name}/unsilence", Unsilenced, describe=silence,
    title="End an alarm's silence")
JOB_CANCEL = AdminWrite("job.cancel", "POST", "jobs/{job}/cancel", fan_out=FanOut.JOB, describe=cancel,
    title="Cancel a job", back="/jobs/{job}", warning="What it has already done is not undone.")
LIMITS_PUT = AdminWrite("limits.put", "PUT", "limits", LimitsWrite, FanOut.HERE, limit, title="Change rates",
    back="/settings", warning="A name that is not listed here has no rate limit afterwards.")
SETTINGS_PUT = AdminWrite("settings.put", "PUT", "settings", SettingsWrite, FanOut.HERE, set_settings,
    title="Change a setting", back="/settings", at="values",
    warning="All servers of the registry use the new value within seconds.")
SETTINGS_ROLLBACK = AdminWrite("settings.rollback", "POST", "settings/rollback", Rollback, FanOut.HERE, roll_back,
    title="Go back to a revision", back="/settings")
CREDENTIAL_ADD = AdminWrite("credential.add", "POST", "credentials", CredentialWrite, FanOut.HERE, grant,
    title="Add a credential", back="/access")
CREDENTIAL_REVOKE = AdminWrite("credential.revoke", "POST", "credentials/{credential}/revoke", fan_out=FanOut.HERE,
    describe=revoke, title="Revoke a credential", back="/access",
    warning="Requests with this credential are refused from now on.")

WRITES = (
    SILENCE, UNSILENCE, JOB_CANCEL, LIMITS_PUT, SETTINGS_PUT, SETTINGS_ROLLBACK, CREDENTIAL_ADD, CREDENTIAL_REVOKE,
    AdminWrite("check_webhooks.put", "PUT", "check-webhooks", WebhooksWrite, FanOut.HERE),
    AdminWrite("message.republish", "POST", "messages/republish", Republish, FanOut.OF_EACH),
    AdminWrite("audit.add", "POST", "audits", AuditWrite, FanOut.HERE),
    AdminWrite("backup.make", "POST", "backups", fan_out=FanOut.NONE),
    AdminWrite("backup.delete", "DELETE", "backups/{name}", fan_out=FanOut.NONE),
)  # fmt: skip
"""The last five are made by programs: the console has no form for them."""
