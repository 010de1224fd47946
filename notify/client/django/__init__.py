"""Notify for Django: sends messages with the transactions of Django's ORM, and runs handlers within them.

    INSTALLED_APPS = [..., "notify.client.django"]
    NOTIFY = {"URL": "http://127.0.0.1:7400", "GROUP": "shop"}

    with transaction.atomic():
        order = Order.objects.create(item="book")
        send(Message("order.placed", {"item": "book"}, key=order.id))

`manage.py migrate` creates the tables; see docs/frameworks.md.
"""

from notify.client.django.configured import flush, producer, publish, schedule, send, start, unschedule
from notify.client.django.inbox import DjangoInbox
from notify.client.django.producer import DjangoProducer
from notify.client.django.tables import create_tables, drop_tables

__all__ = [
    "DjangoInbox",
    "DjangoProducer",
    "create_tables",
    "drop_tables",
    "flush",
    "producer",
    "publish",
    "schedule",
    "send",
    "start",
    "unschedule",
]
