"""Admin routes of what all servers follow by revisions: settings, rate limits, and webhooks for checks."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from fastapi import APIRouter

from notify.admin_api.server import LimitsWrite, Rollback, SettingsWrite, WebhooksWrite
from notify.errors import Conflict
from notify.protocol.limits import check_between, check_name
from notify.protocol.wire import instant
from notify.runtime.threads import in_thread
from notify.server import webhooks
from notify.server.admin.writes import Desk, Who
from notify.server.configuration.revisions import WEBHOOKS, Configuration, Revision
from notify.server.core.flow import RateLimits
from notify.server.settings import Settings, check_trace_url, environment_name

SECRET = "(secret)"


def _revision_row(revision: Revision) -> dict[str, Any]:
    fields = {f.name: f for f in dataclasses.fields(Settings)}
    values = {
        name: SECRET if name in fields and fields[name].metadata["secret"] else value
        for name, value in (revision.settings or {}).items()
    }
    at = instant(revision.at_us) if revision.number else None
    return {"number": revision.number, "at": at, "who": revision.who, "reason": revision.reason, "values": values}


def _setting_row(configuration: Configuration, field: dataclasses.Field[Any]) -> dict[str, Any]:
    value = getattr(configuration.settings, field.name)
    is_changed = field.name in (configuration.revision.settings or {})
    is_given = getattr(configuration.started, field.name) != field.default
    return {
        "name": field.name,
        "value": SECRET if field.metadata["secret"] and value else value,
        "type": _TYPES[field.name].__name__,
        "default": field.default,
        "from": "revision" if is_changed else "start" if is_given else "default",
        "live": field.metadata["live"],
        "low": field.metadata["low"],
        "high": field.metadata["high"],
        "environment": environment_name(field.name),
        "doc": field.metadata["doc"],
    }


_TYPES = typing.get_type_hints(Settings)


def add_routes(routes: APIRouter, desk: Desk) -> None:
    """The routes under `settings`, `limits` and `check-webhooks`."""
    _views(routes, desk)
    _changes(routes, desk)
    _limits(routes, desk)
    _check_webhooks(routes, desk)


def _views(routes: APIRouter, desk: Desk) -> None:
    @routes.get("/settings")
    async def settings() -> dict[str, Any]:
        """List the settings: value, where it comes from, and whether it may change while servers run."""
        rows = [_setting_row(desk.running.administration.configuration, f) for f in dataclasses.fields(Settings)]
        return {"revision": desk.running.administration.configuration.revision.number, "settings": rows}

    @routes.get("/settings/revisions")
    async def revisions(max: int = 100) -> dict[str, Any]:
        """List the revisions, the newest first: values, time, author and reason."""
        check_between("max", max, 1, 10_000)
        rows = await in_thread(desk.running.administration.records.revisions, max)
        return {"revisions": [_revision_row(r) for r in rows]}


def _changes(routes: APIRouter, desk: Desk) -> None:
    @routes.put("/settings")
    async def put_settings(write: SettingsWrite, who: Who) -> dict[str, Any]:
        """Change settings of all servers of the registry while they run."""
        configuration = desk.running.administration.configuration
        if write.after is not None and write.after != configuration.revision.number:
            raise Conflict(f"revision {configuration.revision.number} was made meanwhile: look at it, and try again")
        document = configuration.with_settings(write.values)
        wanted, _ = configuration.check(document)
        if wanted.alarm_webhook:
            webhooks.check_address(wanted.alarm_webhook, wanted)
        check_trace_url(wanted)
        fields = {f.name: f for f in dataclasses.fields(Settings)}

        def shown_value(settings: Settings, name: str) -> Any:
            return SECRET if fields[name].metadata["secret"] else getattr(settings, name)

        changes = {
            name: {"from": shown_value(configuration.settings, name), "to": shown_value(wanted, name)}
            for name in write.values
        }

        async def do() -> Any:
            revision = await desk.running.administration.revise(who, write.reason, document)
            return {"revision": revision.number, "changes": changes}

        preview = {"revision": configuration.revision.number + 1, "changes": changes}
        return await desk.carry_out(write, who, "settings.put", ", ".join(write.values), do, preview)

    @routes.post("/settings/rollback")
    async def rollback(write: Rollback, who: Who) -> dict[str, Any]:
        """Restore the settings and rate limits of an earlier revision, as a new revision."""
        configuration = desk.running.administration.configuration
        wanted = await in_thread(desk.running.administration.records.revision, write.to)
        document = wanted.settings or {}
        configuration.check(document)
        preview = {"from": _revision_row(configuration.revision), "to": _revision_row(wanted)}

        async def do() -> Any:
            revision = await desk.running.administration.revise(who, write.reason, document)
            return {"revision": revision.number, "values": _revision_row(revision)["values"]}

        return await desk.carry_out(write, who, "settings.rollback", str(write.to), do, preview)


def _limits(routes: APIRouter, desk: Desk) -> None:
    @routes.get("/limits")
    async def limits() -> dict[str, Any]:
        """Show the rates by topic, producer group and consumer group; a name that is not listed has no limit."""
        return dataclasses.asdict(desk.running.core.flow.limits)

    @routes.put("/limits")
    async def put_limits(write: LimitsWrite, who: Who) -> dict[str, Any]:
        """Replace all rates; a name that is left out no longer has a limit."""
        for name in [*write.topics, *write.producer_groups, *write.consumer_groups]:
            check_name("name", name)
        wanted = RateLimits(write.topics, write.producer_groups, write.consumer_groups)

        async def do() -> Any:
            document = desk.running.administration.configuration.with_limits(wanted)
            await desk.running.administration.revise(who, write.reason, document)
            return dataclasses.asdict(wanted)

        return await desk.carry_out(write, who, "limits.put", "limits", do, dataclasses.asdict(wanted))


def _check_webhooks(routes: APIRouter, desk: Desk) -> None:
    @routes.get("/check-webhooks")
    async def shown() -> dict[str, Any]:
        """List the addresses by producer group."""
        return {"webhooks": desk.running.administration.configuration.check_webhooks}

    @routes.put("/check-webhooks")
    async def put(write: WebhooksWrite, who: Who) -> dict[str, Any]:
        """Replace all webhooks; their hosts must be on the allow-list, and the server signs its calls."""
        configuration = desk.running.administration.configuration
        for group, url in write.webhooks.items():
            check_name("producer_group", group)
            webhooks.check_address(url, configuration.settings)
        result = {"webhooks": write.webhooks}

        async def do() -> Any:
            document = configuration.document() | {WEBHOOKS: write.webhooks}
            await desk.running.administration.revise(who, write.reason, document)
            return result

        return await desk.carry_out(write, who, "check_webhooks.put", "check-webhooks", do, result)
