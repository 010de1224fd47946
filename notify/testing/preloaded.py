"""Prepares the process that imports this module for children that run `notify …`.

It imports the modules of all commands and makes the admin routes, so that no child has to, and freezes these objects
for the garbage collector. The fork server of a suite imports this module last, see `notify.testing.forked`.
"""

import gc

from notify.cli import main
from notify.server.app import App
from notify.server.management import Management
from notify.server.settings import Settings
from notify.storage.memory import MemoryStore

main.command()
Management(App(Settings(), MemoryStore)).fastapi.openapi()  # makes the admin routes whole
# Otherwise a garbage collection in a child would copy each page that the child shares with the fork server.
gc.collect()
gc.freeze()
