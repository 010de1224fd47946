"""Free ports for servers that are killed and restarted on the same port."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_LOWEST = 10_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES = 200


def free_ports(count: int = 1) -> list[int]:
    """Ports of 127.0.0.1 on which no process listens now. Raises OSError if there are too few.

    The ports lie below the kernel's range for outgoing connections: a port of that range could be taken by an outgoing
    connection while its server is down.
    """
    ports: list[int] = []
    generator = random.SystemRandom()
    for _ in range(_TRIES):
        port = generator.randrange(_LOWEST, _first_ephemeral())
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in ports:
            ports.append(port)
        if len(ports) == count:
            return ports
    raise OSError(f"{_TRIES} tries did not give {count} free ports on 127.0.0.1")


def free_port() -> int:
    """One free port."""
    return free_ports()[0]


def _first_ephemeral() -> int:
    try:
        return max(_LOWEST + 1000, int(_EPHEMERAL.read_text().split()[0]))
    except (OSError, ValueError, IndexError):
        return 32_768  # not Linux, or /proc is missing
