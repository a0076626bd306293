"""How the threads of torch wait for each other: a short while awake, then asleep.

A decode step is some 240 small pieces of parallel work, and after each of them every thread waits
for the slowest. By default the OpenMP library lets them wait awake, in a loop that does nothing,
for several milliseconds. Alone on the machine that is fastest. Beside other programs it is the
slowest of all: the loop uses up the thread's time on the core, so the thread that still has work,
or the next piece of work, waits for a whole turn of the other program, again at every piece.

A thread that sleeps is given a core at once when it is woken, but waking takes some ten
microseconds. So the threads here wait awake for about as long as the others usually need, and then
sleep. `python -m shared.bench waiting` measures what that gives, beside other settings.

The OpenMP library reads its settings when torch loads it. So this comes first in `shared`, and
knows nothing but the environment.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Container, MutableMapping

logger = logging.getLogger("mini_vllm")

# GOMP_SPINCOUNT: turns of libgomp's loop (torch on Linux), some tens of nanoseconds each.
# KMP_BLOCKTIME: milliseconds of libomp and libiomp (torch on Macs), 200 by default. vLLM sets the
# same (v0.11.0, vllm/platforms/cpu.py).
SETTINGS = {"GOMP_SPINCOUNT": "3000", "KMP_BLOCKTIME": "1"}
# Whoever has set one of these knows what he wants.
OF_THE_USER = ("OMP_WAIT_POLICY", "KMP_LIBRARY", *SETTINGS)


def wait_briefly(environ: MutableMapping[str, str], modules: Container[str]) -> bool:
    """Put `SETTINGS` into `environ`, unless the user has set how threads wait.

    Args:
        environ: the environment, `os.environ`.
        modules: what is imported already, `sys.modules`.

    Returns:
        False if torch is imported already and waits as it does by default; a line of the log tells.
    """
    if any(name in environ for name in OF_THE_USER):
        return True
    if "torch" in modules:
        logger.warning(
            "torch was imported before shared, too late to say how its threads wait: beside other "
            "programs steps may take several times as long; import shared first, or set "
            "GOMP_SPINCOUNT=%s before Python starts",
            SETTINGS["GOMP_SPINCOUNT"],
        )
        return False
    environ.update(SETTINGS)
    return True


wait_briefly(os.environ, sys.modules)
