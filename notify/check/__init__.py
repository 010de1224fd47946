"""Check-back: if an outcome gets lost, the server asks the producer group whether the local transaction committed."""

from notify.check.listener import CheckMessageListener, CheckUnavailable, HalfMessage, Outcome
from notify.check.local import LocalTransactionCheck

__all__ = ["CheckMessageListener", "CheckUnavailable", "HalfMessage", "LocalTransactionCheck", "Outcome"]
