"""Servers and simulated faults for the tests of services that use Notify.

`InMemoryServer` is a whole server in the test's own process, with a clock that the test moves:

    from notify.testing import InMemoryServer

    with InMemoryServer() as server:
        producer = TransactionProducer(server.url, group="orders", engine=engine)

Under pytest the fixture `notify_server` needs no import. `explore`, and the mark `notify_crashes`, kill your service at
each step that it takes. `ServerProcess` is a real server as a child process, which a
test may kill and start again on the same data; `forked` starts many of them quickly. All of them need the extra
`server`, and none of them is for production: data in memory is lost when the process ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from notify.testing.crashes import Crashed, crashing
    from notify.testing.explorer import Exploration, Finding, Process, explore
    from notify.testing.process import ServerProcess
    from notify.testing.server import InMemoryServer, Stored

__all__ = [
    "Crashed", "Exploration", "Finding", "InMemoryServer", "Process", "ServerProcess", "Stored", "crashing", "explore",
]  # fmt: skip

_MODULES = {
    "Crashed": "crashes", "crashing": "crashes", "ServerProcess": "process",
    "Exploration": "explorer", "Finding": "explorer", "Process": "explorer", "explore": "explorer",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import on first use, so that a benchmark that starts a child process does not load the server into its own."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'server')}"), name)
