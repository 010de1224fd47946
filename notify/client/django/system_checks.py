"""Notify's part of `manage.py check`: finds an invalid setting NOTIFY, and missing tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, router

from notify.client.django import configured
from notify.client.django.tables import missing_tables
from notify.errors import BindingRefused, NotifyError

LABEL = "notify"


def check_settings(app_configs: Any = None, **_: Any) -> list[CheckMessage]:
    """Check that the setting NOTIFY, if there is one, makes a producer."""
    if not hasattr(settings, "NOTIFY"):
        return []  # the project may make its producers without the setting
    try:
        configured.make(DEFAULT_DB_ALIAS)
    except BindingRefused as error:
        return [Error(str(error), id="notify.E002")]
    except (ImproperlyConfigured, NotifyError) as error:
        return [Error(str(error), id="notify.E001")]
    return []


def check_tables(app_configs: Any = None, databases: Sequence[str] | None = None, **_: Any) -> list[CheckMessage]:
    """Check that the databases that get Notify's migrations have its tables.

    A missing table is only a warning, because `manage.py migrate` runs this check before it creates the tables.
    """
    warnings: list[CheckMessage] = []
    for alias in databases or ():
        if not router.allow_migrate(alias, LABEL):
            continue
        try:
            missing = missing_tables(alias)
        except BindingRefused:
            continue  # no producer uses this database, or `check_settings` reports the error
        if missing:
            warnings.append(
                Warning(
                    f"the database {alias!r} lacks Notify's tables {', '.join(missing)}",
                    hint=f"`manage.py migrate {LABEL} --database {alias}` creates them.",
                    id="notify.W001",
                )
            )
    return warnings
