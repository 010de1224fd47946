"""`notify audit watch` with files of a few lines, so that a short campaign sees them renamed and deleted."""

from __future__ import annotations

from notify.cli.main import main
from notify.runtime.signals import exit_on_signal
from notify.spark.watch import watching
from notify.spark.watch.lines import Lines

FILE_BYTES = 1500
KEPT_FILES = 8

if __name__ == "__main__":
    with exit_on_signal():
        watching.Lines = lambda ledger: Lines(ledger, FILE_BYTES, KEPT_FILES)  # type: ignore[misc, assignment]
        main()
