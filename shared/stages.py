"""Finding a stage by its number. The only place in `shared` that names the stages."""

from __future__ import annotations

import importlib
from types import ModuleType

STAGES = {
    1: "01_block_manager",
    2: "02_paged_attention",
    3: "03_prefix_cache",
    4: "04_chunked_prefill",
}


def load_stage(number: int) -> ModuleType:
    """Import a stage's package. Needed because its name begins with a digit.

    Args:
        number: 1 to 4.

    Raises:
        ValueError: there is no such stage.
    """
    if type(number) is not int or number not in STAGES:
        raise ValueError(f"there is no stage {number!r}; there are {', '.join(map(str, STAGES))}")
    return importlib.import_module(f"stages.{STAGES[number]}")
