"""Connects to a name that has several addresses: one that does not answer (a route of IPv6 that leads nowhere, the
address of a machine that is down) holds nobody up while another one would."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
NEXT_SECONDS = 0.25
"""How long an attempt may last before the next one begins (RFC 8305, section 5)."""


def is_numeric(host: str) -> bool:
    """Whether a host is an address itself, which nobody needs to look up."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether a host is this machine itself: `localhost`, or an address that leads nowhere else."""
    return host == "localhost" or (is_numeric(host) and ipaddress.ip_address(host).is_loopback)


async def addresses_of(host: str, port: int) -> list[str]:
    """The addresses of a host, in the order in which the system prefers them. Raises OSError."""
    if is_numeric(host):
        return [host]
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[4][0]) for address in found))


async def first_connection(
    addresses: Sequence[str], connect: Callable[[str], Awaitable[T]], drop: Callable[[T], None]
) -> T:
    """The first connection that comes about. Each attempt begins when the one before has failed or lasts NEXT_SECONDS.

    `connect` raises OSError where it fails; `drop` gets connections that came about too late. Raises the last failure
    if all attempts fail.
    """
    if len(addresses) == 1:
        return await connect(addresses[0])
    left, attempts, failures = list(reversed(addresses)), list[asyncio.Future[T]](), list[OSError]()
    connections: list[T] = []
    try:
        while not connections:
            if left:
                attempts.append(asyncio.ensure_future(connect(left.pop())))
            elif not attempts:
                raise failures[-1] if failures else OSError("the name has no address")
            seconds = NEXT_SECONDS if left else None
            ended, _ = await asyncio.wait(attempts, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            attempts = [attempt for attempt in attempts if attempt not in ended]
            for attempt in ended:
                try:
                    connections.append(attempt.result())
                except OSError as error:
                    failures.append(error)
    finally:
        for attempt in attempts:
            attempt.cancel()
        late = await asyncio.gather(*attempts, return_exceptions=True)
        for connection in (*connections[1:], *late):
            if not isinstance(connection, BaseException):
                drop(connection)
    return connections[0]


def connected_within(address: tuple[str, int], seconds: float, source: tuple[str, int] | None = None) -> socket.socket:
    """A connected socket, whose time-out is `seconds`, which all attempts share; like `socket.create_connection`, whose
    first attempt may take all the time. Raises OSError."""
    found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    numbers = list(dict.fromkeys((str(each[4][0]), int(each[4][1])) for each in found))
    end = time.monotonic() + seconds
    failure = OSError(f"{address[0]} has no address")
    for number, place in enumerate(numbers):
        share = max(0.001, end - time.monotonic()) / (len(numbers) - number)
        try:
            made = socket.create_connection(place, share, source)
        except OSError as error:
            failure = error
        else:
            made.settimeout(seconds)
            return made
    raise failure
