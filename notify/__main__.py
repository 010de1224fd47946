"""`notify` and `python -m notify`: the command line, or one sentence where the libraries that it needs are missing."""

from __future__ import annotations

import sys

from notify.extras import remedy


def run() -> None:
    """Run the command. Exit code 2 where an extra is missing."""
    try:
        from notify.cli.main import main
    except ImportError as error:
        sentence = remedy(error)
        if sentence is None:
            raise
        sys.stderr.write(f"notify: {sentence}\n")
        sys.exit(2)
    main()


if __name__ == "__main__":
    run()
