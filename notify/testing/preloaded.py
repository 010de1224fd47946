"""Prepares `notify …` where it is imported: with all commands, each of whose modules a child would import for itself.

The fork server of a suite imports it, see `notify.testing.forked`.
"""

from notify.cli import main

main.command()
