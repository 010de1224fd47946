"""Check-back: when an outcome gets lost, the server asks the producer what became of the local transaction."""

from notify.check.listener import CheckMessageListener, CheckUnavailable, HalfMessage, Outcome
from notify.check.local import LocalTransactionCheck

__all__ = ["CheckMessageListener", "CheckUnavailable", "HalfMessage", "LocalTransactionCheck", "Outcome"]
