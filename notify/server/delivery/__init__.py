"""Delivery: per group a position and leases above it; the log itself is shared."""

from notify.server.delivery.delivery import Delivery

__all__ = ["Delivery"]
