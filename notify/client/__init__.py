"""The SDK: what a business service imports. It needs neither the server nor its storage.

A name's module is imported at its first use (PEP 562): a service that only receives does not load what producers need.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from notify.client.consumer.consumer import AsyncConsumer, Consumer
    from notify.client.consumer.reader import AsyncReader, Reader
    from notify.client.inbox.inbox import Inbox
    from notify.client.producer.async_producer import AsyncTransactionProducer
    from notify.client.producer.handles import Prepared, SyncPrepared
    from notify.client.producer.producer import TransactionProducer
    from notify.client.producer.sent import Sent
    from notify.client.producer.withdrawals import (
        AsyncWithdrawal,
        Withdrawal,
        WithdrawalOutcome,
        cancellation,
        replacement,
    )
    from notify.client.tables.creation import create_tables
    from notify.errors import DeadLetter
    from notify.protocol.message import Message, ReceivedMessage
    from notify.runtime.databases import use_explicit_begin

__all__ = [
    "AsyncConsumer",
    "AsyncReader",
    "AsyncTransactionProducer",
    "AsyncWithdrawal",
    "Consumer",
    "DeadLetter",
    "Inbox",
    "Message",
    "Prepared",
    "Reader",
    "ReceivedMessage",
    "Sent",
    "SyncPrepared",
    "TransactionProducer",
    "Withdrawal",
    "WithdrawalOutcome",
    "cancellation",
    "create_tables",
    "replacement",
    "use_explicit_begin",
]

_MODULES = {
    "notify.client.producer.async_producer": ("AsyncTransactionProducer",),
    "notify.client.consumer.consumer": ("AsyncConsumer", "Consumer"),
    "notify.client.producer.handles": ("Prepared", "SyncPrepared"),
    "notify.client.producer.sent": ("Sent",),
    "notify.client.producer.withdrawals": (
        "AsyncWithdrawal",
        "Withdrawal",
        "WithdrawalOutcome",
        "cancellation",
        "replacement",
    ),
    "notify.client.inbox.inbox": ("Inbox",),
    "notify.client.tables.creation": ("create_tables",),
    "notify.client.producer.producer": ("TransactionProducer",),
    "notify.client.consumer.reader": ("AsyncReader", "Reader"),
    "notify.errors": ("DeadLetter",),
    "notify.protocol.message": ("Message", "ReceivedMessage"),
    "notify.runtime.databases": ("use_explicit_begin",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

if not TYPE_CHECKING:  # a type checker would take any name for one of this module

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_MODULE_OF[name]), name)
        return value


def __dir__() -> list[str]:
    return __all__
