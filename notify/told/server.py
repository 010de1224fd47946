"""The server itself: settings, rates, credentials, alarms and jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from notify.told.form import Rows, Told, text
from notify.words import count, exactly, setting
from notify.words import job as work_of


def silence(target: str, r: Mapping[str, Any]) -> Told:
    """An alarm that is silenced, or heard again."""
    alarm = f"Alarm {r['name']}" + (f" of {r['target']}" if r["target"] else "")
    if "who" not in r:
        return Told([f"{alarm} is heard again."])
    return Told([f"{alarm} is silent until {exactly(r['until'])}. The overview still shows it."])


def set_settings(target: str, r: Mapping[str, Any]) -> Told:
    """Settings that change while servers run."""
    cells = [[name, setting(change["from"]), setting(change["to"])] for name, change in r["changes"].items()]
    return Told(
        [f"Revision {r['revision']} changes these settings:"], Rows(["Setting", "Before", "From now on"], cells)
    )


def roll_back(target: str, r: Mapping[str, Any]) -> Told:
    """Settings and rates that become those of an earlier revision."""
    values = r["values"] if "values" in r else r["to"]["values"]
    made = Told([f"Settings and rates become those of revision {target}."])
    if not values:
        made.sentences.append("All settings have the values that the servers were started with.")
    made.rows = Rows(["Setting", "From now on"], [[name, setting(value)] for name, value in values.items()])
    return made


_RATES = (
    ("topics", "topic", "messages a second"),
    ("producer_groups", "producer group", "transactions a second"),
    ("consumer_groups", "consumer group", "messages a second"),
)


def limit(target: str, r: Mapping[str, Any]) -> Told:
    """All rates, which replace those before."""
    cells = [
        [f"{noun} {name}", f"{count(rate)} {unit}"] for kind, noun, unit in _RATES for name, rate in r[kind].items()
    ]
    if not cells:
        return Told(["From now on no name has a rate."])
    return Told(["From now on these names have a rate, and no others:"], Rows(["Name", "Rate"], cells))


def grant(target: str, r: Mapping[str, Any]) -> Told:
    """A credential that is added."""
    until = f" until {exactly(r['expires_at'])}" if r["expires_at"] else ""
    made = Told([f"{r['name']} has these rights{until}: {text(r['rights'])}."])
    if r["id"]:
        made.sentences.append(f"The credential's id is {r['id']}: revoke it by that.")
    return made


def revoke(target: str, r: Mapping[str, Any]) -> Told:
    """A credential that is revoked."""
    return Told([f"Requests with credential {r['id']} of {r['name']} are refused, at all servers within a second."])


def cancel(target: str, r: Mapping[str, Any]) -> Told:
    """A job that is stopped."""
    done = f"{count(r['done'])} of its items are done and stay so, {count(r['failed'])} of them failed"
    return Told([f"Job {r['id']} ({work_of(r['what'])}) ends where it is: {done}."])
