"""Descriptions of writes to the server: settings, rates, credentials, alarms and jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from notify.told.form import Rows, Told, text
from notify.words import count, exactly, setting
from notify.words import job as work_of


def silence(target: str, result: Mapping[str, Any]) -> Told:
    """An alarm that is silenced or unsilenced."""
    alarm = f"Alarm {result['name']}" + (f" of {result['target']}" if result["target"] else "")
    if "who" not in result:
        return Told([f"{alarm} is no longer silenced."])
    return Told([f"{alarm} is silent until {exactly(result['until'])}. The overview still shows it."])


def set_settings(target: str, result: Mapping[str, Any]) -> Told:
    """Settings that change while servers run."""
    cells = [[name, setting(change["from"]), setting(change["to"])] for name, change in result["changes"].items()]
    return Told(
        [f"Revision {result['revision']} changes these settings:"], Rows(["Setting", "Before", "From now on"], cells)
    )


def roll_back(target: str, result: Mapping[str, Any]) -> Told:
    """Settings and rates that are rolled back to an earlier revision."""
    values = result["values"] if "values" in result else result["to"]["values"]
    description = Told([f"Settings and rates become those of revision {target}."])
    if not values:
        description.sentences.append("All settings have the values that the servers were started with.")
    description.rows = Rows(["Setting", "From now on"], [[name, setting(value)] for name, value in values.items()])
    return description


_RATES = (
    ("topics", "topic", "messages a second"),
    ("producer_groups", "producer group", "transactions a second"),
    ("consumer_groups", "consumer group", "messages a second"),
)


def limit(target: str, result: Mapping[str, Any]) -> Told:
    """All rates, which replace the previous rates."""
    cells = [
        [f"{noun} {name}", f"{count(rate)} {unit}"]
        for kind, noun, unit in _RATES
        for name, rate in result[kind].items()
    ]
    if not cells:
        return Told(["From now on no name has a rate."])
    return Told(["From now on these names have a rate, and no others:"], Rows(["Name", "Rate"], cells))


def grant(target: str, result: Mapping[str, Any]) -> Told:
    """A credential that is added."""
    until = f" until {exactly(result['expires_at'])}" if result["expires_at"] else ""
    description = Told([f"{result['name']} has these rights{until}: {text(result['rights'])}."])
    if result["id"]:
        description.sentences.append(f"The credential's id is {result['id']}: it is needed to revoke the credential.")
    return description


def revoke(target: str, result: Mapping[str, Any]) -> Told:
    """A credential that is revoked."""
    return Told(
        [f"Requests with credential {result['id']} of {result['name']} are refused, at all servers within two seconds."]
    )


def cancel(target: str, result: Mapping[str, Any]) -> Told:
    """A job that is stopped."""
    done = f"{count(result['done'])} of its items are done and stay so, {count(result['failed'])} of them failed"
    return Told([f"Job {result['id']} ({work_of(result['what'])}) ends where it is: {done}."])
