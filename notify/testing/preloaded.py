"""Prepares `notify …` for children of the process that imports it: all commands, each of whose modules a child would
import for itself, and a garbage collector that passes over all that was imported.

The fork server of a suite imports it after everything else, see `notify.testing.forked`.
"""

import gc

from notify.cli import main

main.command()
# A child that collects its garbage would copy each page of what it shares with the fork server.
gc.collect()
gc.freeze()
