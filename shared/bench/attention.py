"""How fast decode attention reads the KV cache: context x batch x backend, and a whole step.

The backends are those of stage 02, and dense attention on K and V that are contiguous,
which no paging can beat by much, and the machine's copy bandwidth, measured in the same run. The
last table is a whole decode step of the model in stages 01 and 02.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shared import SamplingParams, load_stage
from shared.engine.backends import load_kernels
from shared.engine.model_shape import ModelShape
from shared.measure.machine import timed
from shared.measure.metrics import MS, Measure
from shared.measure.workloads import Passages
from shared.programs.options import whole

from . import rows
from .options import Parser, sizes
from .results import Report
from .session import Session

KERNELS = "decode attention of one layer"
STEP = "whole decode step"
DENSE, DENSE_GQA = "contiguous", "contiguous, gqa"
ONE_THREAD = "numba, 1 thread"
BACKENDS = {"cpu": ("gather", "numba"), "cuda": ("gather", "triton")}
OWN = {
    "time": Measure("time", "ms", "one call, all sequences of the batch", "lower"),
    "bandwidth": Measure("read", "GB/s", "bytes of K and V of all contexts / time", "higher"),
    "share": Measure(
        "of copy", "%", "read bandwidth / bandwidth of a copy (bytes read + written)", "higher"
    ),
}
STEP_OWN = {"step": Measure("step", "ms", "one step of the engine, all sequences decode", "lower")}
FULL = {
    **{"contexts": [256, 1024, 4096], "batches": [1, 8, 32], "rounds": 15, "long": 8192},
    **{"step_batch": 8, "step_context": 1024, "steps": 40},
}
QUICK = {
    **{"contexts": [256, 1024], "batches": [1, 8], "rounds": 7, "long": 4096},
    **{"step_batch": 4, "step_context": 256, "steps": 16},
}
# All layers' caches together are larger than any last-level cache, as in a model: between two
# calls for one layer all others, and the weights, have passed through it.
POOL_BYTES = 256 * 2**20
COPY_BYTES = 256 * 2**20


def add_options(parser: Parser) -> None:
    """Its own options."""
    parser.add_argument("--contexts", type=whole(1, 131_072), nargs="+", help="tokens")
    parser.add_argument("--batches", type=whole(1, 1024), nargs="+", help="sequences")
    parser.add_argument("--block-size", type=whole(1, 1024), default=16)
    parser.add_argument("--no-step", action="store_true", help="leave the whole decode step out")


def run(session: Session) -> None:
    """All cases, backends in turn; then the whole decode step."""
    args, report = session.args, session.report
    size = sizes(args, FULL, QUICK)
    rounds = args.rounds or size["rounds"]
    report.show(KERNELS, OWN)
    bandwidth = copy_bandwidth(session.shape().device)
    report.settings |= {"copy_gb_s": round(bandwidth, 1), "block_size": args.block_size}
    report.settings["threads"] = torch.get_num_threads()
    report.notes.append(f"copy bandwidth of this machine, in this run: {bandwidth:.1f} GB/s.")
    cases = [
        (context, batch)
        for context in args.contexts or size["contexts"]
        for batch in args.batches or size["batches"]
    ]
    if not args.contexts and not args.batches:
        cases.append((size["long"], 1))  # one long sequence has to keep all cores busy by itself
    names = [f"context {context}, batch {batch}" for context, batch in cases]
    for context, batch in session.track(cases, names):
        kernels(session, context, batch, rounds, bandwidth)
    if not args.no_step:
        whole_step(session, size["step_batch"], size["step_context"], size["steps"])


def copy_bandwidth(device: torch.device) -> float:
    """GB/s of copying one large tensor to another, bytes read and bytes written counted."""
    source = torch.zeros(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source).copy_(source)
    seconds = [timed(lambda: target.copy_(source), device) for _ in range(10)]
    return 2 * COPY_BYTES / statistics.median(seconds) / 1e9


def kernels(session: Session, context: int, batch: int, rounds: int, bandwidth: float) -> None:
    """All backends on sequences of `context` tokens, in turn."""
    report, shape = session.report, session.shape()
    case = Case(shape, context, batch, session.args.block_size, session.args.seed)
    stage = load_stage(2)
    calls: dict[str, Callable[[int], Tensor]] = {
        name: functools.partial(case.paged, load_kernels(stage.__name__, name, shape))
        for name in BACKENDS[case.device.type]
    }
    calls |= {DENSE: case.dense, DENSE_GQA: case.dense_gqa}
    if "numba" in calls and batch == 1:
        calls[ONE_THREAD] = functools.partial(with_one_thread, calls["numba"])
    check_alike({name: call(0) for name, call in calls.items()}, case.dtype)
    for i in range(rounds):
        k = i % len(calls)
        for name in [*list(calls)[k:], *list(calls)[:k]]:
            layers = [(3 * i + j) % case.num_layers for j in range(3)]
            each = [timed(functools.partial(calls[name], n), case.device) for n in layers]
            seconds = statistics.median(each)
            read = case.num_bytes / seconds / 1e9
            values = {"time": seconds * MS, "bandwidth": read, "share": 100 * read / bandwidth}
            report.measure(KERNELS, name, values, context=context, batch=batch)


def with_one_thread(call: Callable[[int], Tensor], layer: int) -> Tensor:
    """The kernel on one core, to see whether one sequence keeps all of them busy."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return call(layer)
    finally:
        torch.set_num_threads(num_threads)


class Case:
    """Sequences of one length, their K and V both in blocks and contiguous, in several layers.

    Args:
        shape: of the model, whose attention it is.
        context: tokens of each sequence.
        batch: sequences.
    """

    def __init__(
        self, shape: ModelShape, context: int, batch: int, block_size: int, seed: int
    ) -> None:
        self.device, self.dtype = shape.device, shape.dtype
        heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.num_bytes = 2 * batch * context * kv_heads * dim * self.dtype.itemsize
        self.num_layers = max(2, min(shape.num_layers, POOL_BYTES // self.num_bytes + 1))
        self.context = context
        self.scale = dim**-0.5
        width = -(-context // block_size)
        generator = torch.Generator().manual_seed(seed)

        def rand(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(self.device, self.dtype)

        self.query = rand(batch, heads, dim)
        # Blocks of all sequences are scattered over the pool, as they are after a while of use.
        order = torch.randperm(batch * width, generator=generator)
        self.block_tables = order.view(batch, width).int().to(self.device)
        self.context_lens = torch.full((batch,), context, dtype=torch.int32, device=self.device)
        # The values are the same in all layers; it is the places that must differ.
        key, value = (rand(batch, kv_heads, context, dim) for _ in range(2))
        self.contiguous = [(key.clone(), value.clone()) for _ in range(self.num_layers)]
        self.pools = [
            tuple(self._into_blocks(x, block_size, width) for x in layer)
            for layer in self.contiguous
        ]

    def _into_blocks(self, x: Tensor, block_size: int, width: int) -> Tensor:
        """`[batch, kv_heads, context, dim]` -> `[num_blocks, block_size, kv_heads, dim]`."""
        batch, kv_heads, context, dim = x.shape
        padded = F.pad(x.transpose(1, 2), (0, 0, 0, 0, 0, width * block_size - context))
        pool = torch.empty(batch * width, block_size, kv_heads, dim, dtype=x.dtype, device=x.device)
        pool[self.block_tables.flatten().long()] = padded.reshape(-1, block_size, kv_heads, dim)
        return pool

    def paged(self, backend: ModuleType, layer: int) -> Tensor:
        """A backend of stage 02, through the block tables: `[batch, heads, dim]`."""
        return backend.paged_decode(
            *(self.query, *self.pools[layer], self.block_tables, self.context_lens),
            *(self.context, self.scale),
        )

    def dense(self, layer: int) -> Tensor:
        """SDPA on contiguous K and V; the heads of a group are rows of one query."""
        k, v = self.contiguous[layer]
        query = self.query.view(len(k), k.shape[1], -1, k.shape[3])
        out = F.scaled_dot_product_attention(query, k, v, scale=self.scale)
        return out.view_as(self.query)

    def dense_gqa(self, layer: int) -> Tensor:
        """The same as torch offers it for groups; which of the two is faster depends."""
        k, v = self.contiguous[layer]
        query = self.query[:, :, None]
        out = F.scaled_dot_product_attention(query, k, v, scale=self.scale, enable_gqa=True)
        return out[:, :, 0]


def check_alike(results: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Raises RuntimeError if a backend computes something else than dense attention."""
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for name, result in results.items():
        error = float((result - results[DENSE]).abs().max())
        if not error <= tolerance:  # not even if it is NaN
            raise RuntimeError(f"{name} is off by {error:.2g} from dense attention")


def whole_step(session: Session, batch: int, context: int, steps: int) -> None:
    """Stages 01 and 02 decode the same sequences, one step in turn."""
    report = session.report
    report.show(STEP, STEP_OWN)
    passages = Passages(session.text(), session.args.seed)
    prompts = [list(passages.take(context)) for _ in range(batch)]
    blocks = batch * -(-(context + steps + 2) // 16)
    engines = {
        rows.STAGES[stage]: session.engine(
            stage, num_blocks=blocks, max_num_batched_tokens=max(8192, context)
        )
        for stage in (1, 2)
    }
    params = SamplingParams(temperature=0, max_tokens=steps + 2, ignore_eos=True)
    names = [f"prefill of {name}" for name in engines]
    for engine in session.track(list(engines.values()), names):
        for prompt in prompts:
            engine.add_request(prompt, params)
        while len(engine.trace.steps) == 0 or not decodes(engine.trace.steps[-1], batch):
            engine.step()
    for i in range(steps):
        for name in list(engines)[:: 1 if i % 2 else -1]:
            engines[name].step()
            step = engines[name].trace.steps[-1]
            assert decodes(step, batch)
            values = {"step": step.duration * MS}
            report.measure(STEP, name, values, batch=batch, context=context)
    for engine in engines.values():
        for request_id in list(engine.trace.steps[-1].sampled):
            engine.abort_request(request_id)


def decodes(step: Any, batch: int) -> bool:
    """Whether all sequences decoded in this step, and nothing else happened."""
    return len(step.slices) == len(step.sampled) == step.num_tokens == batch


def conclude(report: Report) -> None:
    """The project's claims, beside what was measured."""
    for row in [row for row in report.rows() if row["name"] in ("numba", "triton")]:
        name, at = row["name"], row["params"]
        where = f"context {at['context']}, batch {at['batch']}"
        if name == "numba" and at["context"] >= 1024 and at["batch"] == 8:
            ratio = report.ratio(KERNELS, "gather", name, "time", **at)
            report.claim(f"gather / numba, {where}", ratio, 4, at_least=True)
        if name == "numba" and at["context"] >= 256:
            dense = [report.ratio(KERNELS, d, name, "time", **at) for d in (DENSE, DENSE_GQA)]
            ratio = min(filter(None, dense), default=None)
            report.claim(f"contiguous / numba, {where}", ratio, 0.9, at_least=True)
        if name == "numba" and at["batch"] == 1 and at["context"] >= 4096:
            ratio = report.ratio(KERNELS, ONE_THREAD, name, "time", **at)
            if report.settings["threads"] > 1:
                report.claim(f"1 thread / all threads, {where}", ratio, 1.5, at_least=True)
        if name == "triton" and at["context"] >= 4096 and at["batch"] >= 64:
            share = report.median(KERNELS, name, "share", **at)
            report.claim(f"% of copy bandwidth, {where}", share, 70, at_least=True)
    for at in [row["params"] for row in report.rows() if row["name"] == rows.STAGES[2]]:
        ratio = report.ratio(STEP, rows.STAGES[1], rows.STAGES[2], "step", **at)
        where = f"{at['batch']} sequences x {at['context']} tokens"
        report.claim(f"whole step, stage 01 / 02, {where}", ratio, 1.5, at_least=True)
