"""Where the course explains what a test asks for, so that a failure can say what to read.

The first pattern that matches a test's name counts. `conftest.py` puts chapter and section below
the message of a failing test of the contract or of a stage.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

BLOCKS = "1-block-manager"
PAGED = "2-paged-attention"
PREFIX = "3-prefix-cache"
CHUNKS = "4-chunked-prefill"
HOLDS = "The rules, and what breaks without them"

# Tests in the files of a stage.
OF_A_FILE = {
    "test_prefix_cache": [
        ("*B1_*|*full_hit*|*cover*|*finds_its_own*|*next_turn*", PREFIX, "What a lookup finds"),
        ("*B9*|*salt*|*hash*|*constant*", PREFIX, "Hash chains"),
        ("*B5*|*B8*|*A1_*|*failed_attempt*|*pool*", PREFIX, "Holding and releasing"),
        ("*B2*|*B6*|*B7*|*least_recently*|*reset*|*evict*", PREFIX, "The order of reuse"),
        ("*B3*|*B4*|*twins*|*publish*", PREFIX, "Publishing, and not too early"),
        ("*B12*|*budget*|*hits_are_counted*", PREFIX, "The budget"),
        ("*", PREFIX, HOLDS),
    ],
    "test_chunked_prefill": [
        ("*C1_*|*C2_*|*C3_*", CHUNKS, "Where a chunk's tokens go"),
        ("*C4_*|*K6_*|*progress*|*C6_*|*C7_*", CHUNKS, "Progress before the first token"),
        ("*C5_three*", CHUNKS, "The code: three paragraphs"),
        ("*C5_*|*B3_*|*B4_*", CHUNKS, "Prefix cache and chunks together"),
        ("*state_machine*", CHUNKS, "One more state"),
        ("*A1_*|*A3_*", CHUNKS, "An abort in the middle"),
        ("*S4_*|*between_two_tokens*|*share*|*turn*|*S5_*", CHUNKS, "Decodes first"),
        (
            "*S3_*|*half_done_prompt_takes*|*admitted*|*budget_back*|*mixed_company*",
            CHUNKS,
            "Partial prefills that block each other",
        ),
        ("*chunk_by_chunk*", CHUNKS, "Allocation chunk by chunk"),
        ("*S8_*|*C9_*", CHUNKS, "Three budgets"),
        ("*by_hand*", CHUNKS, "One chunk by hand"),
        ("*target_step*|*longer_chunk*", CHUNKS, "A target time instead of a size"),
        ("*unless_told*|*by_default*", CHUNKS, "What it costs, and how large a chunk should be"),
    ],
}

# Tests of the contract, which every stage keeps.
OF_THE_CONTRACT = [
    ("*preempt*|*S7_*", BLOCKS, "When no block is left: preemption"),
    ("*B10_*|*S1_*|*S2_*|*pool*|*A1_*|*A2_*|*interrupt*", BLOCKS, "The block manager"),
    ("*B2_*|*B3_*|*B4_*|*memory_oracle*", BLOCKS, HOLDS),
    ("*the_backend*", PAGED, "The step, as a whole"),
    ("*K2_*|*greedy_tokens*|*share_a_model*|*scale*|*A3_*", BLOCKS, "From a batch to tensors"),
    (
        "*seat*|*S5_*|*S8_*|*first_come*|*overtakes*|*joins*|*prompts_share*|*one_slice*|*C8_*"
        "|*one_token_for_each*|*queue_lengths*|*nothing_to_do*",
        BLOCKS,
        "The scheduler",
    ),
    ("*M[1-5]_*|*seed*|*trace*|*stats*|*times*|*K5_*|*S6_*", BLOCKS, "A sequence and its counters"),
    ("*", BLOCKS, HOLDS),
]


def section(file: str, test: str) -> tuple[str, str] | None:
    """Chapter and heading for a test function of a stage's file; None if it is not of a stage.

    Args:
        file: its module's name, without a package.
    """
    table = OF_THE_CONTRACT if file == "test_stage" else OF_A_FILE.get(file, [])
    for patterns, chapter, heading in table:
        if any(fnmatchcase(test, pattern) for pattern in patterns.split("|")):
            return chapter, heading
    return None
