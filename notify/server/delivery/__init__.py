"""Delivery: each group has a position in each queue and leases above it; all groups share the log."""

from notify.server.delivery.delivery import Delivery

__all__ = ["Delivery"]
