"""The application `notify` of a Django project: its migrations, checks and commands."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.core import checks
from django.db.backends.signals import connection_created


class NotifyConfig(AppConfig):
    """Registers the system checks and listens to database errors. It starts nothing, because every command of the
    project runs this."""

    name = "notify.client.django"
    label = "notify"
    verbose_name = "Notify"

    def ready(self) -> None:
        from notify.client.django.system_checks import check_settings, check_tables

        checks.register(check_settings)
        checks.register(check_tables, checks.Tags.database)
        # Listen before a connection's first message: an error may have undone the change that the message is about.
        connection_created.connect(_listen_to_errors, dispatch_uid="notify")


def _listen_to_errors(connection: Any, **_: Any) -> None:
    from notify.client.django.transactions import listen_to_errors

    listen_to_errors(connection)
