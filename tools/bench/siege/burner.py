"""Burns CPU time as the attackers did, but attacks nobody: the rates beside it are the bar."""

from __future__ import annotations

import os
import time

STEP_SECONDS = 0.005


def burn(share: float) -> None:
    """Use this share of one core until the process is ended."""
    os.nice(5)
    while True:
        began = time.process_time()
        while time.process_time() - began < STEP_SECONDS * share:
            pass
        time.sleep(STEP_SECONDS * max(0.0, 1.0 - share))
