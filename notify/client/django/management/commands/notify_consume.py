"""`manage.py notify_consume PATH`: runs a consumer of the project until a signal stops it."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.utils.module_loading import import_string

from notify.client.consumer.consumer import Consumer
from notify.errors import NotifyError


class Command(BaseCommand):
    help = (
        "Runs a consumer of this project, given as the path of a module's attribute, such as shop.handlers.consumer. "
        "SIGTERM or Ctrl-C ends it, once all messages in hand are settled."
    )

    def add_arguments(self, parser: Any) -> None:
        parser.add_argument("path", help="The consumer, as package.module.name.")

    def handle(self, *args: Any, path: str, **options: Any) -> None:
        try:
            consumer = import_string(path)
        except ImportError as error:
            raise CommandError(f"there is no consumer {path}: {error}") from error
        if not isinstance(consumer, Consumer):
            raise CommandError(
                f"{path} is a {type(consumer).__name__}: name a notify.client.Consumer, such as shop.handlers.consumer"
            )
        try:
            consumer.run()
        except NotifyError as error:
            raise CommandError(str(error)) from error
