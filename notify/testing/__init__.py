"""For the tests of services that use Notify: a whole server in the test's own process, with a clock that one can move.

    from notify.testing import InMemoryServer

    with InMemoryServer() as server:
        producer = TransactionProducer(server.url, group="orders", engine=engine)

With pytest the fixture `notify_server` is there by itself. Needs the extra `server`; nothing of it is for production:
what is in memory is gone with the process.
"""

from notify.testing.crashes import crashing
from notify.testing.server import Crashed, InMemoryServer, Stored

__all__ = ["Crashed", "InMemoryServer", "Stored", "crashing"]
