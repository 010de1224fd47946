"""fdatasync in the kernel, which signals its end on a file descriptor that an event loop can watch.

Linux has two interfaces for that. This is the older one, `io_submit` with IOCB_CMD_FDSYNC (Linux 4.18), because many
containers forbid io_uring. No thread of this process waits, so none must be woken or take the interpreter's
lock. Layouts and numbers are those of linux/aio_abi.h and of the tables of system calls.
"""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Any

_SETUP, _DESTROY, _SUBMIT, _EVENTS = "io_setup", "io_destroy", "io_submit", "io_getevents"
_NUMBERS = {
    "x86_64": {_SETUP: 206, _DESTROY: 207, _EVENTS: 208, _SUBMIT: 209},
    "aarch64": {_SETUP: 0, _DESTROY: 1, _SUBMIT: 2, _EVENTS: 4},
}
"""The numbers of the system calls, by machine; glibc has no functions for them."""
_FDSYNC = 3
_TELL_BY_EVENTFD = 1


class _Request(ctypes.Structure):
    """struct iocb, little-endian."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("key", ctypes.c_uint32),
        ("rw_flags", ctypes.c_uint32),
        ("opcode", ctypes.c_uint16),
        ("priority", ctypes.c_int16),
        ("fd", ctypes.c_uint32),
        ("buffer", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("event_fd", ctypes.c_uint32),
    )


class _Event(ctypes.Structure):
    """struct io_event."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("request", ctypes.c_uint64),
        ("result", ctypes.c_int64),
        ("result2", ctypes.c_int64),
    )


class KernelSync:
    """One sync at a time, for one thread."""

    def __init__(self) -> None:
        """Raises OSError if this machine or its sandbox lacks these calls."""
        numbers = _NUMBERS.get(platform.machine())
        if numbers is None or ctypes.sizeof(ctypes.c_void_p) != 8:
            raise OSError(38, f"no numbers of system calls are known for {platform.machine()}")
        self._numbers = {name: ctypes.c_long(number) for name, number in numbers.items()}
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long
        self._context = ctypes.c_ulong(0)
        self._call(_SETUP, ctypes.c_long(1), ctypes.byref(self._context))
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable once the sync is done."""
        self._request = _Request(opcode=_FDSYNC, flags=_TELL_BY_EVENTFD, event_fd=self.event_fd)
        self._requests = (ctypes.c_void_p * 1)(ctypes.addressof(self._request))
        self._event = _Event()
        self._one = ctypes.c_long(1)

    def submit(self, fd: int) -> None:
        """Begin to sync the data of a file. Raises OSError, with EINVAL if its file system does not support it."""
        self._request.fd = fd
        self._call(_SUBMIT, self._context, self._one, self._requests)

    def result(self) -> None:
        """Call this once `event_fd` is readable. Raises OSError if the sync failed."""
        os.eventfd_read(self.event_fd)
        self._call(_EVENTS, self._context, self._one, self._one, ctypes.byref(self._event), None)
        if self._event.result < 0:
            raise OSError(-self._event.result, os.strerror(-self._event.result))

    def close(self) -> None:
        """Release everything, after waiting for a sync that is under way."""
        self._call(_DESTROY, self._context)
        os.close(self.event_fd)

    def _call(self, name: str, *arguments: Any) -> None:
        if self._syscall(self._numbers[name], *arguments) < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{name}: {os.strerror(number)}")
