"""The computed tables of the course: from shapes of real models, and from runs without a model.

Each is Markdown. Heads and words come from `docs/_data/words.LOCALE.yml`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shared.draw.tables import markdown
from shared.models import configs
from shared.measure.roofline import ModelSize
from shared.engine.step_time import StepTimeModel
from shared.engine.step_time import work as work_of
from tools.site import sources as docs_code
from tools.site import example
from tools.site.sources import DocsError

Words = Mapping[str, Any]
GIB = 2**30


def table(name: str, words: Mapping[str, Words]) -> str:
    """One of `TABLES`, as Markdown. Raises DocsError if it is not known or has no words."""
    if name not in TABLES:
        raise DocsError(f"no table {name!r}; there are {', '.join(TABLES)}")
    if name not in words:
        raise DocsError(f"table {name!r} has no words")
    return TABLES[name](words[name])


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1) -> str:
    return f"\n{markdown(heads, rows, left)}\n"


# --- shapes of real models --------------------------------------------------------------------


def kv(words: Words) -> str:
    """Bytes of K and V: of a token, of the running example's document, of a full context."""
    rows = []
    for name in configs.names():
        config, size = configs.read(name), ModelSize.named(name)
        layers, heads = config["num_hidden_layers"], config["num_key_value_heads"]
        context = config["max_position_embeddings"]
        rows.append(
            [
                f"`{name}`",
                f"2 × {layers} × {heads} × {config['head_dim']} × 2 = {size.kv_bytes:,}",
                f"{size.kv_bytes * example.DOCUMENT_TOKENS / 2**20:,.0f}&nbsp;MiB",
                f"{context:,}",
                f"{size.kv_bytes * context / GIB:,.2f}&nbsp;GiB",
                f"{2 * size.total / GIB:,.2f}&nbsp;GiB",
            ]
        )
    return _markdown(words["heads"], rows)


def work(words: Words) -> str:
    """Arithmetic per step against weights read per step, for one real model in 16 bits."""
    weights = 2 * ModelSize.named("llama-3.1-8b").matrices
    rows = []
    for label, tokens in zip(words["rows"], (1, 4, 256, 1500), strict=True):
        flops = tokens * weights  # a multiplication and an addition per weight of two bytes
        rows.append(
            [label, f"{tokens:,}", f"{flops / 1e12:,.2f}", f"{weights / 1e9:.1f}", f"{tokens:,}"]
        )
    return _markdown(words["heads"], rows)


# --- runs -------------------------------------------------------------------------------------


def counters(words: Words) -> str:
    """The document's counters, step by step, on stage 04."""
    rows = []
    generated = 0
    for step in example.run(4)[example.ARRIVALS[example.DOCUMENT] :][:9]:
        name = example.DOCUMENT
        generated += name in step.sampled
        _, start_pos, num_tokens = next(s for s in step.slices if s[0] == name)
        cached = step.cached[name]
        rows.append(
            [
                step.index,
                f"{start_pos:,}&nbsp;..&nbsp;{start_pos + num_tokens:,}",
                step.states[name].upper(),
                f"{min(cached, example.DOCUMENT_TOKENS):,}",
                f"{cached:,}",
                generated,
                len(step.tables[name]),
            ]
        )
    return _markdown(words["heads"], rows)


def _story(keeper: example.Bookkeeper, words: Words) -> str:
    """Steps of two sequences: who holds how many blocks, who is in which state, who gave way."""
    rows = []
    for step in keeper.steps:
        slices = ", ".join(f"{n} {a}..{a + k}" for n, a, k in step.slices)
        cells: list[object] = [step.index, slices]
        for name in ("A", "B"):
            state = step.states.get(name)
            blocks = len(step.tables.get(name, []))
            cells.append(f"{state.upper()}, {blocks}" if state else words["done"])
        rows.append([*cells, step.num_free_blocks, ", ".join(step.preempted)])
    return _markdown(words["heads"], rows)


def preemption(words: Words) -> str:
    """Stage 01, 8 blocks of 4, two prompts of 9 tokens with 9 to generate."""
    return _story(_two(1, 9, 9, num_blocks=8), words)


def deadlock(words: Words) -> str:
    """Stage 04, 6 blocks of 4, chunks of 4, two prompts of 16 tokens."""
    return _story(deadlock_run(), words)


def deadlock_run() -> example.Bookkeeper:
    """The run of `deadlock`, to its end."""
    return _two(4, 16, 2, num_blocks=6, max_prefill_chunk_size=4)


def _two(stage: int, num_tokens: int, max_tokens: int, **options: Any) -> example.Bookkeeper:
    """Two prompts of so many tokens, which come together, with blocks of 4; run to their ends."""
    keeper = example.Bookkeeper(stage, block_size=4, **options)
    for name, first in (("A", 0), ("B", 100)):
        keeper.add(name, range(first, first + num_tokens), max_tokens)
    keeper.drain()
    return keeper


def orders(words: Words) -> str:
    """A document, and a new prompt in every step: PREFILLING before WAITING, and the other way."""
    rows = []
    for label, order in zip(words["rows"], ("123", "132"), strict=True):
        keeper = orders_run(order)
        slices = example.chunks(keeper.steps, example.DOCUMENT)
        last = slices[-1][0]
        short = next(s.index for s in keeper.steps if "new0" in s.sampled)
        held = sum(len(s.tables[example.DOCUMENT]) for s in keeper.steps[:last])
        rows.append([label, len(slices), last + 1, short + 1, f"{held:,}"])
    return _markdown(words["heads"], rows)


def orders_run(order: str) -> example.Bookkeeper:
    """Stage 04 with the paragraphs of `schedule` in this order, a budget of 256 tokens a step."""
    keeper = example.Bookkeeper(
        4,
        num_blocks=2000,
        max_num_batched_tokens=256,
        max_num_seqs=200,
        enable_prefix_caching=False,
    )
    keeper.scheduler.__class__ = reordered(order)
    keeper.add(example.DOCUMENT, range(example.DOCUMENT_TOKENS), 1)
    keeper.step()
    for i in range(60):
        keeper.add(f"new{i}", range(200), 1)
        keeper.step()
    return keeper


def reordered(order: str) -> Any:
    """Stage 04's `Scheduler` with the three numbered paragraphs of `schedule` in another order."""
    path = "stages/04_chunked_prefill/scheduler.py"
    first, last = docs_code.span(path, "Scheduler.schedule")
    lines = docs_code._source(path)[first - 1 : last]
    starts = [
        i for i, line in enumerate(lines) if line.strip().startswith(("# 1.", "# 2.", "# 3."))
    ]
    end = max(i for i, line in enumerate(lines) if line.startswith("        return"))
    if len(starts) != 3:
        raise DocsError(f"{path}: schedule has no three numbered paragraphs any more")
    bounds = [*starts, end]
    parts = [lines[bounds[i] : bounds[i + 1]] for i in range(3)]
    body = [*lines[: starts[0]], *(line for i in order for line in parts[int(i) - 1]), *lines[end:]]
    room = example.rooms(4).scheduler
    scope: dict[str, Any] = dict(vars(room))
    source = ast.parse("class Scheduler(Scheduler):\n" + "\n".join(body))
    exec(compile(source, f"<{path}, order {order}>", "exec"), scope)
    return scope["Scheduler"]


def work_per_token(words: Words) -> str:
    """Tokens computed between two tokens of chat A: the most, on each stage."""
    rows = []
    for stage, label in zip((1, 2, 3, 4), words["rows"], strict=True):
        gaps = example.tokens_between(example.run(stage), "A")
        document = example.chunks(example.run(stage), example.DOCUMENT)
        rows.append([label, f"{max(gaps):,}", len(document), f"{sum(n for _, _, n in document):,}"])
    return _markdown(words["heads"], rows)


def softmax(words: Words) -> str:
    """The online softmax by hand: three blocks of two scores, values of one number."""
    scores = np.array([[1.0, 3.0], [2.0, 5.0], [4.0, 0.0]])
    values = np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
    maximum, total, acc = -np.inf, 0.0, 0.0
    rows = []
    for i, (s, v) in enumerate(zip(scores, values, strict=True)):
        new_maximum = max(maximum, s.max())
        rescale = np.exp(maximum - new_maximum)
        weights = np.exp(s - new_maximum)
        total, acc = total * rescale + weights.sum(), acc * rescale + weights @ v
        maximum = new_maximum
        shown = ", ".join(f"{x:g}" for x in s), ", ".join(f"{x:g}" for x in v)
        rows.append([i, *shown, f"{maximum:g}", f"{rescale:.4f}", f"{total:.4f}", f"{acc:.4f}"])
    weights = np.exp(scores - scores.max())
    exact = (weights * values).sum() / weights.sum()
    if abs(acc / total - exact) > 1e-12:
        raise DocsError("the online softmax does not give the softmax")
    whole = words["whole"].format(acc=f"{acc:.4f}", total=f"{total:.4f}", out=f"{acc / total:.4f}")
    return _markdown(words["heads"], rows) + f"\n{whole}\n"


def gathered(words: Words) -> str:
    """Bytes that one decode moves for attention, in all layers, with and without a copy."""
    size = 2 * ModelSize.named("smollm2-135m").kv_bytes  # in float32
    step = example.run(1)[example.ARRIVALS[example.DOCUMENT] + 1]
    rows = []
    for name, label in (("C", words["chat"]), (example.DOCUMENT, words["document"])):
        tokens = step.cached[name]
        mib = size * tokens / 2**20
        rows.append([label, f"{tokens:,}", f"{mib:.1f}", f"{3 * mib:.1f}", f"{mib:.1f}"])
    return _markdown(words["heads"], rows)


def twins(words: Words) -> str:
    """Two requests with the same prompt in one step of stage 03: their tables before and after."""
    keeper = example.Bookkeeper(3)
    first, second = (keeper.add(name, range(example.SYSTEM_TOKENS), 8) for name in "AB")
    batch = keeper.scheduler.schedule()
    rows = [[words["computed"], f"`{first.block_table}`", f"`{second.block_table}`"]]
    keeper.scheduler.commit(batch, [1] * len(batch.sampling))
    rows.append([words["committed"], f"`{first.block_table}`", f"`{second.block_table}`"])
    return _markdown(words["heads"], rows)


def lookups(words: Words) -> str:
    """What lookups find in stage 03, for prompts of different kinds."""
    keeper = example.Bookkeeper(3)

    def serve(name: str, token_ids: list[int], max_tokens: int, **more: Any) -> list[int]:
        """Serve a request to its end; return its tokens, the generated ones included."""
        sequence = keeper.add(name, token_ids, max_tokens, **more)
        keeper.drain()
        found = sequence.num_hit_tokens
        rows.append([words[name], len(token_ids), found, len(token_ids) - found])
        return list(sequence.token_ids)

    rows: list[list[object]] = []
    first = example.prompt("A")
    system = first[: example.SYSTEM_TOKENS]
    known = serve("cold", first, example.MAX_TOKENS["A"])
    serve("other", example.prompt("B"), 1)
    serve("again", first, 1)
    serve("turn", [*known, *range(50_000, 50_020)], 1)
    serve("boundary", system[:32], 1)
    serve("changed", [99, *first[1:]], 1)
    serve("salted", first, 1, cache_salt="somebody else")
    return _markdown(words["heads"], rows)


def chunk_sizes(words: Words) -> str:
    """128 streams and a prompt of 8,192 tokens: what the chunk size decides, counted."""
    rows = []
    for size in (256, 512, 1024, 2048, 4096, 8192):
        keeper = example.Bookkeeper(
            4,
            num_blocks=1024,
            max_num_seqs=256,
            max_num_batched_tokens=8192 + 128,
            max_model_len=16_384,
            max_prefill_chunk_size=size,
            enable_prefix_caching=False,
        )
        for i in range(128):
            keeper.add(f"{i}", [i], 200)
        keeper.step()
        keeper.add("long", range(8192), 1)
        while "long" in keeper.sequences:
            keeper.step()
        chunks = example.chunks(keeper.steps, "long")
        most = max(step.num_tokens for step in keeper.steps)
        rows.append([f"{size:,}", len(chunks), f"{most:,}", f"{128 * (len(chunks) - 1):,}"])
    return _markdown(words["heads"], rows, left=0)


def budgets(words: Words) -> str:
    """Four streams and two documents that come together: what the budget of a step decides."""
    rows: list[list[object]] = []
    chunk_size, num_seqs = 128, 64
    for budget in (8192, chunk_size + num_seqs, chunk_size):
        keeper = example.Bookkeeper(
            4,
            num_blocks=1024,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=8192,
            max_prefill_chunk_size=chunk_size,
        )
        for i in range(4):
            keeper.add(f"{i}", [i], 200)
        keeper.step()
        for i, name in enumerate(("one", "two")):
            keeper.add(name, range(10_000 * i, 10_000 * i + 3072), 1)
        while "two" in keeper.sequences:
            keeper.step()
        steps = [example.chunks(keeper.steps, name)[-1][0] for name in ("one", "two")]
        most = max(step.num_tokens for step in keeper.steps)
        rows.append([f"{budget:,}", f"{most:,}", *steps])
    return _markdown(words["heads"], rows, left=0)


def target(words: Words) -> str:
    """Chunks that `target_step_ms` chooses for a prompt of 8,000 tokens, with a made-up cost."""
    keeper = example.Bookkeeper(
        4,
        num_blocks=1024,
        max_num_batched_tokens=8192,
        max_model_len=16_384,
        max_prefill_chunk_size=8192,
    )
    model = keeper.scheduler.step_time = StepTimeModel(target=20e-3)
    keeper.add("A", [1], 400)
    rows: list[list[object]] = []
    for index in range(400):
        if index == 10:
            keeper.add("long", range(8000), 1)
        batch = keeper.scheduler.schedule()
        _, tokens, context = work_of(batch.slices)
        seconds = 2e-3 + 2e-5 * tokens + 5e-9 * context
        model.observe(batch.slices, seconds)
        keeper.scheduler.commit(batch, [1] * len(batch.sampling))
        for s in batch.slices:
            if s.sequence.request_id == "long":
                rows.append([len(rows), f"{s.start_pos:,}", s.num_tokens, f"{1e3 * seconds:.1f}"])
        if keeper.sequences.get("long") in batch.sampling:
            break
    shown: list[list[object]] = [*rows[:8], ["…", "", "", ""], *rows[-4:]]
    return _markdown(words["heads"], shown, left=0)


def abort(words: Words) -> str:
    """The document is aborted after its third chunk: what comes back."""
    keeper = example.Bookkeeper(4)
    rows = []
    for index in range(16):
        keeper.arrive(index)
        if index == 15:
            keeper.finish(example.DOCUMENT, "abort")
            rows.append([words["abort"], "FINISHED", 0, keeper.block_manager.num_free_blocks])
        else:
            step = keeper.step()
            if index >= example.ARRIVALS[example.DOCUMENT]:
                state = step.states[example.DOCUMENT].upper()
                held = len(step.tables[example.DOCUMENT])
                rows.append([f"{words['step']} {index}", state, held, step.num_free_blocks])
    return _markdown(words["heads"], rows, left=2)


def metadata(words: Words) -> str:
    """What attention is told about a step: stage 01's step 13, five decodes."""
    step = example.run(1)[example.ARRIVALS[example.DOCUMENT] + 1]
    mapping = example.rooms(1).block_manager.slot_mapping
    rows = []
    for row, (name, start_pos, num_tokens) in enumerate(step.slices):
        table = step.tables[name]
        slot = mapping(table, start_pos, num_tokens, example.BLOCK_SIZE)[0]
        shown = str(table) if len(table) < 8 else f"[{table[0]}, {table[1]}, …, {table[-1]}]"
        rows.append([name, row, f"{start_pos:,}", slot, f"{step.cached[name]:,}", f"`{shown}`"])
    return _markdown(words["heads"], rows)


TABLES: dict[str, Callable[[Words], str]] = {
    make.__name__: make
    for make in (
        *(kv, work, counters, preemption, deadlock, orders, work_per_token),
        *(softmax, gathered, metadata, twins, lookups, chunk_sizes, budgets, target, abort),
    )
}
