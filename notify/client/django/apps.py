"""The application `notify` of a Django project: its migrations, checks and commands."""

from __future__ import annotations

from django.apps import AppConfig
from django.core import checks


class NotifyConfig(AppConfig):
    """Registers the checks. Nothing is started here: every command of the project comes by."""

    name = "notify.client.django"
    label = "notify"
    verbose_name = "Notify"

    def ready(self) -> None:
        from notify.client.django.system_checks import check_settings, check_tables

        checks.register(check_settings)
        checks.register(check_tables, checks.Tags.database)
