"""The default name of a process among the instances of its group."""

from __future__ import annotations

import os
import socket
import uuid


def instance_name() -> str:
    """A unique name that shows the machine and the process."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
