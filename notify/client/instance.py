"""The name of this process among the instances of its group."""

from __future__ import annotations

import os
import socket
import uuid


def instance_name() -> str:
    """A name that no other process has, and that says which machine and process it is."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
