"""How the threads of torch wait for each other: a short time in a busy loop, then asleep.

A decode step has some 240 parallel regions, and at the end of each every thread waits for the
slowest. By default the OpenMP library lets a thread wait in a busy loop for several milliseconds.
This is the fastest way while the cores are free. When other programs use them too, it is by far the
slowest: the loop uses up the thread's time slice, so that the other program runs next, and the work
that is left waits for the whole of that program's slice. This may happen in every region.

A sleeping thread is given a core as soon as it is woken, but waking it takes some ten microseconds.
So the threads here spin for a fraction of a millisecond, which covers the work between two regions,
and then sleep. With less, a step on a free machine takes longer; beside programs that compute all
the time, OMP_WAIT_POLICY=passive (sleep at once) is better still.
`python -m shared.bench waiting` compares this with other settings.

The OpenMP library reads its settings when torch loads it, so `shared` imports this module first.
It knows nothing but the environment.
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
# If one of these is set, the user has decided.
OF_THE_USER = ("OMP_WAIT_POLICY", "KMP_LIBRARY", *SETTINGS)


def wait_briefly(environ: MutableMapping[str, str], modules: Container[str]) -> bool:
    """Put `SETTINGS` into `environ`, unless the user has set how threads wait.

    Args:
        environ: the environment, `os.environ`.
        modules: what is imported already, `sys.modules`.

    Returns:
        False if torch is imported already and waits in its own way; a line of the log says so.
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
