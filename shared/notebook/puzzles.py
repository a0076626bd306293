"""The notebooks' puzzles: each check says at once whether an answer is right, or what went wrong.

A check computes the right answer and those that typical mistakes lead to, so a hint speaks about
the mistake that was made. An answer that is still `...` is a friendly line and no error, so a
notebook runs through. Knows no engine and no trace: a puzzle gets what it is about as arguments.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

BLOCK_SIZE = 16  # in all notebooks
OPEN = "Put your answer in place of `...`, and run this cell again."


class Verdict:
    """What a check found. `right` is None as long as there is no answer."""

    def __init__(self, right: bool | None, text: str) -> None:
        self.right, self.text = right, text

    def _repr_html_(self) -> str:
        mark = {None: "✎", True: "✓", False: "→"}[self.right]
        text = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(self.text, quote=False))
        return f"<p>{mark} {text}</p>"

    def __repr__(self) -> str:
        return self.text


def is_open(answer: Any) -> bool:
    """Whether an answer, or a part of it, is still `...` or None."""
    if isinstance(answer, (list, tuple)):
        return any(map(is_open, answer))
    return answer is None or answer is ...


def judge(
    answer: Any, right: Any, praise: str, mistakes: Sequence[tuple[Any, str]], hint: str
) -> Verdict:
    """Compare an answer with the right one, then with each mistake's.

    Args:
        mistakes: (the answer it leads to, the hint for it), likeliest first.
        hint: for all others: how to find the answer.
    """
    if is_open(answer):
        return Verdict(None, OPEN)
    if _same(answer, right):
        return Verdict(True, praise)
    wanted = f"{len(right)} values" if isinstance(right, (list, tuple)) else "one number"
    wanted = "a name" if isinstance(right, str) else wanted
    if not _comparable(answer, right):
        return Verdict(False, f"The answer is {wanted}, this is `{answer!r}`. {hint}")
    for wrong, why in mistakes:
        if _same(answer, wrong):
            return Verdict(False, why)
    return Verdict(False, hint)


def _comparable(answer: Any, right: Any) -> bool:
    if isinstance(right, (list, tuple)):
        return isinstance(answer, (list, tuple)) and len(answer) == len(right)
    if isinstance(right, str):
        return isinstance(answer, str)
    return isinstance(answer, (int, float)) and not isinstance(answer, bool)


def _same(answer: Any, right: Any) -> bool:
    if not _comparable(answer, right):
        return False
    if isinstance(right, (list, tuple)):
        return all(_same(a, r) for a, r in zip(answer, right, strict=True))
    if isinstance(right, float):  # by hand, to three digits
        return math.isclose(answer, right, rel_tol=5e-3, abs_tol=1e-9)
    return answer == right


# --- 01: blocks -------------------------------------------------------------------------------


def check_slots(answer: Any, block_table: Sequence[int], tokens: Sequence[int]) -> Verdict:
    """In which slots are these tokens of a sequence?"""

    def slots(where: Callable[[int], int]) -> list[int]:
        return [where(t) for t in tokens]

    size, last = BLOCK_SIZE, len(block_table) - 1
    return judge(
        answer,
        slots(lambda t: block_table[t // size] * size + t % size),
        "Right. Logical block by division, physical block by the table, offset by the remainder.",
        [
            (list(tokens), "Those are the tokens themselves. The block table says where they are."),
            (
                slots(lambda t: block_table[t // size]),
                "Those are blocks, of `block_size` slots each.",
            ),
            (
                slots(lambda t: block_table[t // size] * size),
                "Those are the first slots of the right blocks. Add the offset in the block.",
            ),
            (
                slots(lambda t: block_table[t // size] + t % size),
                "Block plus offset: but a block is `block_size` slots long, so multiply it first.",
            ),
            (
                slots(lambda t: block_table[max(t - 1, 0) // size] * size + max(t - 1, 0) % size),
                "One too far to the front. Tokens count from 0.",
            ),
            (
                slots(lambda t: block_table[min((t + 1) // size, last)] * size + (t + 1) % size),
                "One too far to the back. Tokens count from 0.",
            ),
        ],
        "For each token: which logical block, `t // block_size`? Which physical block does the "
        "table give for it? At which offset, `t % block_size`?",
    )


def check_counters(answer: Any, prompt_tokens: int, num_decodes: int) -> Verdict:
    """After a prefill and some decodes: tokens in the cache, generated tokens, blocks held."""
    cached, generated = prompt_tokens + num_decodes, num_decodes + 1

    def blocks(tokens: int) -> int:
        return -(-tokens // BLOCK_SIZE)

    right = (cached, generated, blocks(cached))
    mistakes: list[tuple[bool, str]] = []
    if _comparable(answer, right):
        a, b, c = answer
        mistakes = [
            (
                a == cached + 1,
                "The newest token is known but not in the cache: it is the next input.",
            ),
            (b == num_decodes, "The prefill generates a token, too: the first one."),
            ((a, b) == (generated, cached), "The first two are exchanged: cached comes first."),
            (a == num_decodes, "The prompt's keys and values are in the cache as well."),
            (
                (a, b, c) == (cached, generated, cached // BLOCK_SIZE),
                "The last block is not full, and it is held all the same.",
            ),
            (
                (a, b, c) == (cached, generated, blocks(cached + 1)),
                "Blocks are for what is in the cache. The newest token has no place yet.",
            ),
        ]
    return judge(
        answer,
        right,
        "Right. Known and cached differ by one: the newest token has not been through the model.",
        [(answer, why) for made, why in mistakes if made],
        "Begin with the prefill: it caches the whole prompt and generates one token. Then each "
        "decode caches one token and generates the next. Count the blocks of what is cached.",
    )


def check_victim(answer: Any, arrived: Sequence[str], asking: str) -> Verdict:
    """No block is free and `asking` needs one: who is preempted? `arrived` is oldest first."""
    return judge(
        answer,
        arrived[-1],
        "Right. The youngest is preempted, so the oldest always advances, and all finish.",
        [
            (asking, f"{asking} is not the youngest. Which one arrived last?"),
            (
                arrived[0],
                "Then two requests could preempt each other forever.",
            ),
        ],
        f"Only {', '.join(arrived)} hold blocks. It does not matter which holds most; it matters "
        "which one arrived last.",
    )


# --- 02: attention ----------------------------------------------------------------------------


def check_reads(answer: Any, context_len: int) -> Verdict:
    """How many table entries does a decode read, and how many slots of the last block?"""
    entries, last = -(-context_len // BLOCK_SIZE), (context_len - 1) % BLOCK_SIZE + 1
    return judge(
        answer,
        (entries, last),
        "Right. The slots after the last token hold old memory, and the kernel never loads them.",
        [
            ((context_len // BLOCK_SIZE, last), "A last block that is not full is read as well."),
            (
                (entries, BLOCK_SIZE),
                "Not the whole last block: the slots after the last token hold old memory.",
            ),
            (
                (entries, 0),
                "The remainder is 0, and yet the last block is read: then it is a full one.",
            ),
            ((entries, BLOCK_SIZE - last), "That is how many slots of the last block are empty."),
        ],
        f"Put {context_len} tokens into blocks of {BLOCK_SIZE}: how many blocks are touched, and "
        "how many tokens are in the last of them?",
    )


def check_merge(
    answer: Any, one: tuple[float, float, float], other: tuple[float, float, float]
) -> Verdict:
    """Merge (maximum, total, acc) of two parts of one context."""
    (m1, total1, acc1), (m2, total2, acc2) = one, other
    m = max(m1, m2)

    def merged(f1: float, f2: float, g1: float, g2: float) -> tuple[float, float, float]:
        return m, total1 * f1 + total2 * f2, acc1 * g1 + acc2 * g2

    f1, f2 = math.exp(m1 - m), math.exp(m2 - m)
    return judge(
        answer,
        merged(f1, f2, f1, f2),
        "Right. Rescale both parts to one maximum, then add the sums.",
        [
            (merged(1, 1, 1, 1), "The sums have different maxima. Bring both to the larger one."),
            (
                merged(1 / f1, 1 / f2, 1 / f1, 1 / f2),
                "The factor is the wrong way round: the part with the smaller maximum must shrink.",
            ),
            (
                merged(f2, f1, f2, f1),
                "The right factors on the wrong parts: the larger maximum stays as it is.",
            ),
            (merged(f1, f2, 1, 1), "`total` is right. `acc` is off by the same factor."),
            (
                (m1 + m2, total1 * f1 + total2 * f2, acc1 * f1 + acc2 * f2),
                "The maximum of both parts is the larger of the two, not their sum.",
            ),
        ],
        "First the common maximum m. Then multiply both sums of each part by e to the power of "
        "(its own maximum - m), and add.",
    )


def check_attend(function: Callable[[Tensor, Tensor, Tensor, list[int], int], Any]) -> Verdict:
    """One query head reads a paged cache: `function(query, k_cache, v_cache, table, context_len)`.

    query `[D]`, caches `[num_blocks, block_size, D]`; returns `[D]`. What was not written is NaN.
    """
    generator = torch.Generator().manual_seed(0)
    dim, size, context_len, table = 8, 4, 10, [5, 1, 3]
    query = torch.randn(dim, generator=generator) * 3
    flat = torch.randn(2, context_len, dim, generator=generator)
    cache = torch.full((2, 7, size, dim), math.nan)
    for t in range(context_len):
        cache[:, table[t // size], t % size] = flat[:, t]
    try:
        result = function(query, cache[0], cache[1], list(table), context_len)
    except Exception as error:
        return Verdict(False, f"It stops with {type(error).__name__}: {error}.")
    if is_open(result):
        return Verdict(None, "Write the body of the function, and run this cell again.")
    if not isinstance(result, Tensor) or result.shape != (dim,):
        shape = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        return Verdict(False, f"It must return a tensor `[{dim}]`, this is {shape}.")

    def attention(tokens: Tensor, scale: float) -> Tensor:
        weights = torch.softmax(tokens[0] @ query * scale, dim=0)
        return weights @ tokens[1]

    scale = dim**-0.5
    others = [
        (flat[:, : context_len // size * size], "The last block is missing: not full, but read."),
        (flat[:, :-1], "The last token is missing: it attends to itself, too."),
    ]
    if result.isnan().any():
        text = "NaN: it read a slot that was never written. "
        unwritten = "Stop at `context_len` in the last block, and go through the table."
        return Verdict(False, text + unwritten)
    if torch.allclose(result, attention(flat, scale), atol=1e-4):
        return Verdict(True, "Right. That is PagedAttention: a lookup in the loop over blocks.")
    for tokens, why in others:
        if torch.allclose(result, attention(tokens, scale), atol=1e-4):
            return Verdict(False, why)
    if torch.allclose(result, attention(flat, 1.0), atol=1e-4):
        return Verdict(False, "The scores are not scaled: multiply them by `D ** -0.5`.")
    if torch.allclose(result, flat[1].mean(0), atol=1e-4):
        return Verdict(False, "That is the plain mean of the values. Weight them by their scores.")
    return Verdict(
        False,
        "Compute it by hand for comparison: gather the 10 keys and values in the order of the "
        "table, and take `softmax(keys @ query * D ** -0.5) @ values`.",
    )


# --- 03: prefixes -----------------------------------------------------------------------------


def check_found(answer: Any, num_common: int, num_tokens: int) -> Verdict:
    """How many tokens of a prompt are found, of which the first `num_common` were seen before?"""
    covered = min(num_common, num_tokens - 1)
    right = covered // BLOCK_SIZE * BLOCK_SIZE
    return judge(
        answer,
        right,
        "Right. Full blocks only, and never the last token.",
        [
            (
                num_common // BLOCK_SIZE * BLOCK_SIZE,
                "If all of it were found, the last token would not be computed, and there would be "
                "no logits to sample from.",
            ),
            (
                num_common,
                "Only full blocks have a hash. The rest of the common tokens is computed.",
            ),
            (num_tokens - 1, "The last token is computed, and its whole block with it."),
            (
                right + BLOCK_SIZE,
                "One block too many: it is not full of common tokens, or it holds the last token.",
            ),
            (right // BLOCK_SIZE, "Those are blocks. The question asks for tokens."),
            (0, "Equal tokens from the beginning are found again, as far as they fill blocks."),
        ],
        f"Count the full blocks of {BLOCK_SIZE} among the first {num_common} tokens. Then see that "
        "at least one token is left to compute.",
    )


def check_renamed(answer: Any, changed: int, num_tokens: int) -> Verdict:
    """Token `changed` of a prompt is replaced: which logical blocks get another hash?"""
    full = num_tokens // BLOCK_SIZE
    first = changed // BLOCK_SIZE
    right = list(range(first, full))
    if not is_open(answer) and isinstance(answer, (list, tuple)):
        if sorted(answer) == list(range(first, full + 1)) and num_tokens % BLOCK_SIZE:
            return Verdict(False, f"Block {full} is not full, so it has no hash that could change.")
        if list(answer) == [first] and right != [first]:
            return Verdict(False, "Each hash depends on the one before. Which blocks come after?")
        if 0 in answer and first > 0:
            return Verdict(False, "What comes before the changed token does not depend on it.")
        answer = sorted(answer)
        if len(answer) != len(right):
            return Verdict(
                False, "Follow the chain from the block of the changed token to the last full one."
            )
    return judge(
        answer,
        right,
        "Right. Its own block and all after it: a hash covers everything from the beginning.",
        [],
        "Follow the chain from the block of the changed token to the last full one.",
    )


def check_reuse(answer: Any, table: Sequence[int], num_tokens: int) -> Verdict:
    """A sequence ends: in which order are its blocks reused? (No other block is free.)"""
    full = num_tokens // BLOCK_SIZE
    tail, head = list(table[full:]), list(table[:full])
    return judge(
        answer,
        tail + head[::-1],
        "Right. First the block without content to find, then the tail before the head.",
        [
            (tail + head, "Without its head, the rest cannot be found. Which end should go first?"),
            (list(table), "In the table's order the head goes first, and the rest is lost."),
            (
                head[::-1] + tail,
                "The block that is not full has no hash: reusing it costs nothing.",
            ),
        ],
        "Two questions: which block cannot be found again? And of the others, which one is still "
        "useful without the next?",
    )


# --- 04: chunks -------------------------------------------------------------------------------


def check_chunks(answer: Any, num_tokens: int, chunk_size: int, found: int = 0) -> Verdict:
    """How many chunks, how long is the last one, and how many of them output a token?"""
    left = num_tokens - found
    count = -(-left // chunk_size)
    last = left - (count - 1) * chunk_size
    whole = -(-num_tokens // chunk_size)
    return judge(
        answer,
        (count, last, 1),
        "Right. Only after the last chunk has the model seen the whole prompt.",
        [
            ((count, last, count), "A chunk in the middle has no last prompt token."),
            ((count, last, 0), "The last chunk ends the prompt: there is the first output token."),
            (
                (whole, num_tokens - (whole - 1) * chunk_size, 1),
                "What the prefix cache has found is not computed, so it is not cut either.",
            ),
            ((left // chunk_size, last, 1), "The last chunk counts, though it is shorter."),
            ((count, chunk_size, 1), "The last chunk takes what is left, and that is less."),
        ],
        "How many tokens are left to compute? Cut them. Then ask of each chunk: does it reach the "
        "prompt's last token?",
    )


def check_chunk_slot(answer: Any, start_pos: int, index_in_chunk: int) -> Verdict:
    """In which logical block and at which offset does this token of a chunk lie?"""
    t = start_pos + index_in_chunk
    return judge(
        answer,
        divmod(t, BLOCK_SIZE),
        "Right. The index in the whole sequence, as in stage 01.",
        [
            (
                divmod(index_in_chunk, BLOCK_SIZE),
                "You counted from the beginning of the chunk. That slot belongs to the beginning "
                "of the prompt, and it would be overwritten.",
            ),
            (
                (
                    -(-start_pos // BLOCK_SIZE) + index_in_chunk // BLOCK_SIZE,
                    index_in_chunk % BLOCK_SIZE,
                ),
                "A chunk does not begin a new block: it continues where the one before it ended.",
            ),
            (divmod(t + 1, BLOCK_SIZE), "One too far. Tokens count from 0."),
            (divmod(t, BLOCK_SIZE)[::-1], "Exchanged: the block comes first, then the offset."),
        ],
        "First the index in the whole sequence: `start_pos` plus the index in the chunk. Then "
        "`divmod` by the block size.",
    )


def check_chunk_len(
    answer: Any, budget: int, chunk_size: int, num_streams: int, num_left: int
) -> Verdict:
    """How long is the next chunk of a prompt, if streams go first?"""
    room = budget - num_streams
    return judge(
        answer,
        max(0, min(room, chunk_size, num_left)),
        "Right. The least of the rest of the prompt, the chunk size and what the streams leave.",
        [
            (min(budget, chunk_size, num_left), "The streams take a token each, before any chunk."),
            (chunk_size, "The chunk size is only an upper limit. What else limits a chunk?"),
            (room, "That much budget is left. What else limits a chunk?"),
            (num_left, "That much of the prompt is left. What else limits a chunk?"),
        ],
        "Three limits: what is left of the prompt, the chunk size, and the budget less one token "
        "for each stream.",
    )


# --- 05: measures -----------------------------------------------------------------------------


def check_measures(answer: Any, arrival: float, token_times: Sequence[float]) -> Verdict:
    """TTFT, longest ITL and TPOT of one request, in the unit of the times."""
    first, last, n = token_times[0], token_times[-1], len(token_times)
    gaps = [b - a for a, b in pairwise(token_times)]
    ttft, itl, tpot = first - arrival, max(gaps), (last - first) / (n - 1)
    return judge(
        answer,
        (ttft, itl, tpot),
        "Right. Note which of the three the user noticed.",
        [
            ((first, itl, tpot), "TTFT begins when the request was added, not at 0."),
            ((ttft, max(ttft, itl), tpot), "The wait for the first token is TTFT, not a gap."),
            ((ttft, itl, (last - first) / n), "n tokens have n - 1 gaps between them."),
            ((ttft, itl, (last - arrival) / n), "TPOT leaves the first token's wait out."),
            (
                (ttft, sorted(gaps)[len(gaps) // 2], tpot),
                "That is the median gap. The question asks for the longest.",
            ),
        ],
        "TTFT: arrival to first token. ITL: each gap between neighbours. TPOT: (last - first) / "
        "(n - 1).",
    )


def check_quantile(answer: Any, num_gaps: int, num_stalls: int) -> Verdict:
    """Which of p50, p90, p99, max first shows the stalls among so many gaps?"""
    share = num_stalls / num_gaps
    names = {"p50": 0.5, "p90": 0.1, "p99": 0.01}
    right = next((name for name, above in names.items() if share > above), "max")
    return judge(
        answer,
        right,
        "Right. A percentile misses what is rarer than its distance from 100.",
        [
            (
                name,
                f"{num_stalls} of {num_gaps} gaps are {100 * share:.2g} %. {name} leaves "
                f"{100 * above:g} % above it: are they among them?",
            )
            for name, above in names.items()
        ]
        + [("max", "The maximum shows them, but something shows them before.")],
        'Answer with one of "p50", "p90", "p99", "max".',
    )
