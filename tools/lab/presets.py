"""The sandbox's settings to begin with."""

from __future__ import annotations

from typing import Any

from tools.lab.faults import request, setting

PRESETS: dict[str, dict[str, Any]] = {
    "example": setting(
        request("A", 0, 47, 40, shared=40),
        request("B", 2, 53, 40, shared=40),
        request("C", 4, 61, 40, shared=40),
        request("D", 6, 70, 40, shared=40),
        request("document", 12, 1500, 8, shared=40),
        num_blocks=128,
        max_num_batched_tokens=2048,
        max_prefill_chunk_size=256,
    ),
    "documents": setting(
        request("A", 0, 47, 40, shared=40),
        request("B", 2, 53, 40, shared=40),
        request("document", 8, 1200, 8),
        request("document 2", 10, 900, 8),
        num_blocks=160,
        max_num_batched_tokens=512,
        max_prefill_chunk_size=256,
    ),
    "tiny": setting(
        request("A", 0, 30, 60),
        request("B", 1, 25, 60),
        request("C", 2, 20, 60),
        request("D", 3, 40, 30),
        num_blocks=14,
        max_prefill_chunk_size=32,
    ),
    "shared": setting(
        *(request(name, 3 * i, 200 + 7 * i, 20, shared=192) for i, name in enumerate("ABCDEF")),
        num_blocks=96,
    ),
    "deadlock": setting(
        request("A", 0, 16, 2),
        request("B", 0, 16, 2),
        block_size=4,
        num_blocks=6,
        max_num_batched_tokens=8,
        max_prefill_chunk_size=4,
    ),
}
