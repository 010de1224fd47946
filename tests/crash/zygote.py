"""Forks real server processes in milliseconds: the imports are done once, so that 500 crashes fit into minutes.

Reads lines of JSON from stdin: settings and a crash point; answers each with the child's process id. A child is a
whole `notify serve`, and dies by SIGKILL like any other.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from notify.server.serve import serve
from notify.settings import Settings
from storage import crash_point


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            devnull = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(devnull, fd)
            crash_point.arm(order["crash_at"])
            os._exit(serve(Settings(**order["settings"])))
        print(pid, flush=True)


if __name__ == "__main__":
    main()
