"""The SDK: what a business service imports. It needs neither the server nor its storage.

A name's module is imported at its first use (PEP 562): a service that only receives does not load what producers need.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from notify.client.async_producer import AsyncTransactionProducer
    from notify.client.consumer import AsyncConsumer, Consumer
    from notify.client.handles import Prepared, SyncPrepared
    from notify.client.inbox import Inbox
    from notify.client.making_tables import create_tables
    from notify.client.producer import TransactionProducer
    from notify.client.reader import AsyncReader, Reader
    from notify.errors import DeadLetter
    from notify.protocol.message import Message, ReceivedMessage
    from notify.runtime.databases import use_explicit_begin

__all__ = [
    "AsyncConsumer",
    "AsyncReader",
    "AsyncTransactionProducer",
    "Consumer",
    "DeadLetter",
    "Inbox",
    "Message",
    "Prepared",
    "Reader",
    "ReceivedMessage",
    "SyncPrepared",
    "TransactionProducer",
    "create_tables",
    "use_explicit_begin",
]

_MODULES = {
    "notify.client.async_producer": ("AsyncTransactionProducer",),
    "notify.client.consumer": ("AsyncConsumer", "Consumer"),
    "notify.client.handles": ("Prepared", "SyncPrepared"),
    "notify.client.inbox": ("Inbox",),
    "notify.client.making_tables": ("create_tables",),
    "notify.client.producer": ("TransactionProducer",),
    "notify.client.reader": ("AsyncReader", "Reader"),
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
