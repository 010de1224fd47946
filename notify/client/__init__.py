"""The SDK: what a business service imports. It needs neither the server nor its storage."""

from notify.client.consumer.consumer import AsyncConsumer, Consumer
from notify.client.consumer.reader import AsyncReader, Reader
from notify.client.inbox.inbox import Inbox
from notify.client.producer.async_producer import AsyncTransactionProducer
from notify.client.producer.handles import Prepared, SyncPrepared
from notify.client.producer.producer import TransactionProducer
from notify.client.tables.creation import create_tables
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
