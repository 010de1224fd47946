"""`notify` and `python -m notify`: runs the command line, or says which extra is missing for it."""

from __future__ import annotations

import signal
import sys

from notify.runtime.extras import remedy


def run() -> None:
    """Run the command. Exits with code 2 if an extra is missing."""
    try:
        from notify.cli.main import main

        main()
    except ImportError as error:
        sentence = remedy(error)
        if sentence is None:
            raise
        sys.stderr.write(f"notify: {sentence}\n")
        sys.exit(2)
    except KeyboardInterrupt:  # while modules were loaded; a running command handles it itself
        from notify.runtime.signals import end_by

        end_by(signal.SIGINT)


if __name__ == "__main__":
    run()
