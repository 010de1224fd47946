"""`manage.py notify_check`: answers checks until a signal stops it."""

from __future__ import annotations

import threading
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError
from django.db import DEFAULT_DB_ALIAS, Error

from notify.client.django import configured
from notify.client.django.tables import missing_tables
from notify.errors import NotifyError
from notify.runtime.signals import heeding_signals

LOOK_SECONDS = 0.5
"""How often the main thread wakes up: the system may deliver a signal to any thread, and Python's handler runs only
once the main thread does."""


class Command(BaseCommand):
    help = (
        "Answers checks of the producer group in the setting NOTIFY: the server asks for the outcome of transactions "
        "whose outcome got lost. Processes that send messages answer checks too; run this command if all of them may "
        "be down at the same time. SIGTERM or Ctrl-C ends it."
    )

    def add_arguments(self, parser: Any) -> None:
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help="The alias of the database that answers.")

    def handle(self, *args: Any, database: str, **options: Any) -> None:
        try:
            producer = configured.make(database, answer_checks=True)
            missing = missing_tables(database)
        except (ImproperlyConfigured, NotifyError) as error:
            raise CommandError(str(error)) from error
        except Error as error:
            raise CommandError(f"the database {database!r} cannot be asked: {error}") from error
        if missing:
            raise CommandError(
                f"the database {database!r} lacks Notify's tables {', '.join(missing)}: run `manage.py migrate`"
            )
        ended = threading.Event()
        with heeding_signals(ended.set), producer:
            producer.start()
            self.stdout.write(f"answers checks of group {producer.group} ({producer.instance}) at {producer.url}")
            self.stdout.flush()
            while not ended.wait(LOOK_SECONDS):
                pass
