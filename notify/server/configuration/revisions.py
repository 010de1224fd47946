"""Settings that change while the server runs: the settings at its start, overridden by the newest revision."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from notify.server.core.flow import RateLimits
from notify.server.core.objectives import Objective
from notify.server.core.pushes import Push
from notify.server.settings import Settings, changed

LIMITS, WEBHOOKS, PUSHES, OBJECTIVES = "limits", "check_webhooks", "pushes", "objectives"
"""The keys under which a revision has the rate limits, the webhooks of producer and consumer groups, and the objectives
of consumer groups."""
_BESIDE = (LIMITS, WEBHOOKS, PUSHES, OBJECTIVES)


@dataclass(frozen=True, slots=True)
class Revision:
    """Settings that hold from `at_us` on (microseconds since 1970); number 0: nothing was ever changed."""

    number: int = 0
    at_us: int = 0
    who: str = ""
    reason: str = ""
    settings: dict[str, Any] | None = None


class Configuration:
    """The settings, rate limits, webhooks and objectives that hold now."""

    def __init__(self, started: Settings) -> None:
        self.started = started
        """From flags, environment and file."""
        self.settings = started
        self.limits = RateLimits()
        self.check_webhooks: dict[str, str] = {}
        """Addresses by producer group."""
        self.pushes: dict[str, Push] = {}
        """Webhooks by consumer group."""
        self.objectives: dict[str, Objective] = {}
        """How soon messages are to be acknowledged, by consumer group."""
        self.revision = Revision()

    def check(self, document: dict[str, Any]) -> tuple[Settings, RateLimits]:
        """The settings and limits of this server with a revision's document. Raises InvalidRequest if it is invalid."""
        values = {name: value for name, value in document.items() if name not in _BESIDE}
        return changed(self.started, values), RateLimits(**document.get(LIMITS, {}))

    def hold(self, revision: Revision) -> None:
        """Apply a revision. If it is invalid, raises InvalidRequest and changes nothing."""
        document = revision.settings or {}
        self.settings, self.limits = self.check(document)
        self.check_webhooks = dict(document.get(WEBHOOKS, {}))
        self.pushes = {group: Push(**fields) for group, fields in document.get(PUSHES, {}).items()}
        self.objectives = {group: Objective(**fields) for group, fields in document.get(OBJECTIVES, {}).items()}
        self.revision = revision

    def document(self) -> dict[str, Any]:
        """A copy of the current revision's document, from which the next one is made."""
        return dict(self.revision.settings or {})

    def with_settings(self, values: dict[str, Any]) -> dict[str, Any]:
        """The next document with these settings; None: the value at the server's start. Raises InvalidRequest."""
        document = self.document()
        changed(
            self.started, {name: getattr(self.started, name, None) if v is None else v for name, v in values.items()}
        )
        for name, value in values.items():
            if value is None:
                document.pop(name, None)
            else:
                document[name] = value
        wanted, _ = self.check(document)
        # The parsed values, not those of the request: 5 and "5" are the same value.
        return {name: value if name in _BESIDE else getattr(wanted, name) for name, value in document.items()}

    def with_limits(self, limits: RateLimits) -> dict[str, Any]:
        """The next document with these rate limits."""
        return self.document() | {LIMITS: dataclasses.asdict(limits)}

    def with_groups(self, part: str, by_group: Mapping[str, Push] | Mapping[str, Objective]) -> dict[str, Any]:
        """The next document with these webhooks (PUSHES) or OBJECTIVES of consumer groups."""
        return self.document() | {part: {group: dataclasses.asdict(row) for group, row in by_group.items()}}
