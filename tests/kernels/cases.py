"""Paged attention problems with known answers, for every backend.

A problem is a mixed batch over one shuffled pool in which every slot that no token was written to
is NaN: whatever a kernel reads beyond its context shows. The answer is dense attention in float64.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

NUM_KV_HEADS = 2
HEAD_DIMS = (64, 80, 96, 128, 256)
GROUPS = (1, 3, 4, 8)  # query heads per KV head
BLOCK_SIZES = (1, 8, 16, 32)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Case(NamedTuple):
    """One point of the grid. Its contexts are 1, block_size - 1, the same, + 1, and 1000."""

    dtype: torch.dtype
    head_dim: int
    group: int
    block_size: int

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}-d{self.head_dim}-g{self.group}-bs{self.block_size}"

    @property
    def contexts(self) -> list[int]:
        return [1, self.block_size - 1, self.block_size, self.block_size + 1, 1000]


PLAIN = Case(torch.float32, head_dim=64, group=3, block_size=16)
GRID = [Case(*point) for point in itertools.product(DTYPES, HEAD_DIMS, GROUPS, BLOCK_SIZES)]


def pairwise(grid: list[Case]) -> list[Case]:
    """A small part of the grid in which any two values that meet in the grid still meet."""

    def pairs(case: Case) -> set[tuple[object, ...]]:
        return set(itertools.combinations(enumerate(case), 2))

    missing = set().union(*(pairs(case) for case in grid))
    chosen = []
    while missing:
        chosen.append(max(grid, key=lambda case: len(pairs(case) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


@dataclass
class Problem:
    """The arguments of the kernels, and what they must return, float64.

    query `[T, H, D]`, the slices one after another; key, value `[T, KVH, D]` of the same tokens,
    which are in the caches too. `answer` is what the slices' attention must give.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    context_lens: Tensor
    query_start_loc: Tensor
    scale: float
    answer: Tensor

    @property
    def max_context_len(self) -> int:
        return int(self.context_lens.max())

    @property
    def max_query_len(self) -> int:
        return int(self.query_start_loc.diff().max())

    def rows(self, i: int) -> slice:
        return slice(int(self.query_start_loc[i]), int(self.query_start_loc[i + 1]))


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Dense attention in float64: `[T, H, D]` to `[S, KVH, D]`; the T queries are the last of S."""
    group = query.shape[1] // key.shape[1]
    q, k, v = query.double(), *(x.double().repeat_interleave(group, 1) for x in (key, value))
    scores = torch.einsum("thd,shd->hts", q, k) * scale
    visible = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(len(k) - len(q))
    return torch.einsum("hts,shd->thd", scores.where(visible, -torch.inf).softmax(-1), v)


def slots_of(block_table: Tensor, start: int, end: int, block_size: int) -> Tensor:
    """int64 slots of the tokens at positions start .. end - 1."""
    t = torch.arange(start, end, device=block_table.device)
    return block_table[t // block_size].long() * block_size + t % block_size


def make_problem(
    case: Case,
    contexts: list[int],
    query_lens: list[int],
    device: str = "cpu",
    max_blocks: int | None = None,
    scale: float | None = None,
) -> Problem:
    """A batch of slices: each is the last `query_len` tokens of its context.

    Entries of a block table behind the context name a block of NaN. A context of 0 with a query of
    1 is a row of padding, as decode has them; its answer is 0.
    """
    generator = torch.Generator().manual_seed(sum(map(hash, (*contexts, *case[1:]))))

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype).to(device)

    dim, block_size = case.head_dim, case.block_size
    counts = [-(-context // block_size) for context in contexts]
    width = max(counts) if max_blocks is None else max_blocks
    shuffled = torch.randperm(sum(counts) + 2, generator=generator).int()
    poison, free = shuffled[0], iter(shuffled[1:].split(1))
    block_tables = torch.full((len(contexts), width), int(poison), dtype=torch.int32)
    for i, count in enumerate(counts):
        for j in range(count):
            block_tables[i, j] = next(free)
    block_tables = block_tables.to(device)

    pool = (len(shuffled), block_size, NUM_KV_HEADS, dim)
    k_cache, v_cache = torch.full((2, *pool), torch.nan, dtype=case.dtype, device=device)
    queries, keys, values, answers = [], [], [], []
    scale = dim**-0.5 if scale is None else scale
    for i, (context, query_len) in enumerate(zip(contexts, query_lens, strict=True)):
        key, value = random(2, context, NUM_KV_HEADS, dim)
        query = random(query_len, NUM_KV_HEADS * case.group, dim)
        slots = slots_of(block_tables[i], 0, context, block_size)
        k_cache.flatten(0, 1)[slots], v_cache.flatten(0, 1)[slots] = key, value
        queries.append(query)
        keys.append(key[-query_len:])
        values.append(value[-query_len:])
        answers.append(attend(query, key, value, scale) if context else torch.zeros_like(query))
    return Problem(
        *(torch.cat(rows) for rows in (queries, keys, values)),
        k_cache,
        v_cache,
        block_tables,
        torch.tensor(contexts, dtype=torch.int32, device=device),
        torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32, device=device),
        scale,
        torch.cat([x.double() for x in answers]),
    )


def load(path: Path) -> ModuleType:
    """Kernels by their file, which may import its neighbours."""
    package = ModuleType(f"kernels_in_{abs(hash(path.parent))}")
    package.__path__ = [str(path.parent)]
    sys.modules[package.__name__] = package
    return importlib.import_module(f"{package.__name__}.{path.stem}")


def assert_close(got: Tensor, answer: Tensor, dtype: torch.dtype) -> None:
    """Within a few roundings of the dtype. NaN equals nothing, so poison that was read fails."""
    few = (32 if dtype == torch.float32 else 4) * torch.finfo(dtype).eps
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), answer, rtol=few, atol=few)


def decode(kernels: ModuleType, problem: Problem, **options: object) -> Tensor:
    return kernels.paged_decode(
        problem.query, problem.k_cache, problem.v_cache, problem.block_tables,
        problem.context_lens, problem.max_context_len, problem.scale, **options,
    )  # fmt: skip


def prefill(kernels: ModuleType, problem: Problem, **options: object) -> Tensor:
    return kernels.paged_prefill(
        problem.query, problem.key, problem.value, problem.k_cache, problem.v_cache,
        problem.block_tables, problem.context_lens, problem.query_start_loc,
        problem.max_query_len, problem.scale, **options,
    )  # fmt: skip


def one_by_one(problem: Problem) -> Iterator[tuple[slice, Problem]]:
    """Each slice as a problem of its own, on the same pool, with the rows that it had."""
    for i in range(len(problem.context_lens)):
        rows = problem.rows(i)
        yield (
            rows,
            Problem(
                *(x[rows] for x in (problem.query, problem.key, problem.value)),
                problem.k_cache,
                problem.v_cache,
                problem.block_tables[i : i + 1],
                problem.context_lens[i : i + 1],
                problem.query_start_loc[i : i + 2] - problem.query_start_loc[i],
                problem.scale,
                problem.answer[rows],
            ),
        )


def check_decode(kernels: ModuleType, case: Case, device: str = "cpu", **options: object) -> None:
    """All contexts of a case, and a row of padding."""
    contexts = [*case.contexts, 0]
    problem = make_problem(case, contexts, [1] * len(contexts), device)
    assert_close(decode(kernels, problem, **options), problem.answer, case.dtype)


def check_prefill(kernels: ModuleType, case: Case, device: str = "cpu") -> None:
    """Whole prompts, the end of one, and a slice of one token after a long past."""
    contexts = [context for context in (*case.contexts, 40) if context]
    problem = make_problem(case, contexts, [*contexts[:-2], 1, 13], device)
    assert_close(prefill(kernels, problem), problem.answer, case.dtype)
