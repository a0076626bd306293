"""What every benchmark needs around its measuring: models, engines, turns, a progress bar.

Knows how to make things ready, not what is measured.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from shared import SamplingParams, load_stage
from shared.engine.memory import bytes_per_block
from shared.engine.model_shape import ModelShape
from shared.measure.workloads import read_text
from shared.models import LoadedModel, inspect_model, load_model

from .options import base_name
from .results import Report


class Session:
    """One run of one benchmark.

    Args:
        args: its options, those of `options.add_common` among them.
        report: where the numbers go.
    """

    def __init__(self, args: argparse.Namespace, report: Report) -> None:
        self.args = args
        self.report = report
        self.console = Console(stderr=True)
        self._shape: ModelShape | None = None

    def model(self) -> LoadedModel:
        """The model that our rows share, its linear layers packed where that helps."""
        loaded = self._load(pack_linears=True)
        if self._shape is None:
            shape = self._shape = inspect_model(loaded.model)
            self.report.model = {
                "name": base_name(self.args.model),
                "dtype": str(shape.dtype).removeprefix("torch."),
                "device": shape.device.type,
                "num_layers": shape.num_layers,
                "num_heads": shape.num_heads,
                "num_kv_heads": shape.num_kv_heads,
                "head_dim": shape.head_dim,
                "kv_bytes_per_token": bytes_per_block(shape, 1),
            }
        return loaded

    def shape(self) -> ModelShape:
        """The shape of that model."""
        self.model()
        assert self._shape is not None
        return self._shape

    def stock_model(self) -> LoadedModel:
        """The same weights as `transformers` loads them."""
        return self._load(pack_linears=False)

    def _load(self, pack_linears: bool) -> LoadedModel:
        args = self.args
        with self.console.status(f"loading {args.model}"):
            return _load_model(args.model, args.device, args.dtype, pack_linears)

    def bytes_per_token(self) -> int:
        """Bytes of K and V that one token takes over all layers."""
        return bytes_per_block(self.shape(), 1)

    def text(self) -> list[int]:
        """The text that workloads are cut from, as the model's token ids."""
        with self.console.status("reading the text"):
            return _tokenize(self.args.text, self.model().tokenizer)

    def engine(self, stage: int, **options: Any) -> Any:
        """An engine of a stage on the shared model, warmed up, its trace with block tables."""
        with self.console.status(f"making an engine of stage {stage:02d}"):
            engine = load_stage(stage).LLMEngine(model=self.model(), **options)
            prompts = [list(range(3, 3 + n)) for n in (40, 24)]
            engine.generate(
                prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), False
            )
        engine.trace.record_blocks = True
        fresh(engine)
        return engine

    def turns(
        self, names: Sequence[str], rounds: int, only_once: Collection[str] = ()
    ) -> Iterator[str]:
        """Each name once in each round, every round beginning with another one.

        Rows are measured in turn, so that a machine which slows down slows all of them down.

        Args:
            only_once: names that are measured in the first round only.
        """
        plan = []
        for i in range(rounds):
            k = i % len(names)
            plan += [(i, n) for n in [*names[k:], *names[:k]] if i == 0 or n not in only_once]
        for _, name in self.track(plan, [f"{name}, round {i + 1}" for i, name in plan]):
            yield name

    def track(self, items: Sequence[Any], names: Sequence[str]) -> Iterator[Any]:
        """Iterate over `items` with a progress bar that says which one is being measured."""
        title = self.report.benchmark
        if not self.console.is_terminal:
            tell = functools.partial(self.console.print, highlight=False, markup=False)
            for i, (item, name) in enumerate(zip(items, names, strict=True)):
                tell(f"[{i + 1}/{len(items)}] {title}: {name}", end="")
                start = time.perf_counter()
                yield item
                tell(f" ({time.perf_counter() - start:.1f} s)")
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        # Drawing takes time from what is measured: twice a second is enough.
        with Progress(
            *columns, console=self.console, refresh_per_second=2, transient=True
        ) as progress:
            task = progress.add_task(title, total=len(items))
            for item, name in zip(items, names, strict=True):
                progress.update(task, description=f"{title}: {name}")
                yield item
                progress.advance(task)


def fresh(engine: Any) -> None:
    """Make an engine forget what it served: no cached prefix, no trace.

    Raises:
        RuntimeError: it is still serving something.
    """
    if engine.has_unfinished_requests():
        raise RuntimeError("the engine has unfinished requests")
    if hasattr(engine, "reset_prefix_cache"):
        engine.reset_prefix_cache()
    engine.trace.steps.clear()


# Loading takes seconds, and several benchmarks may run in one process.
_load_model = functools.lru_cache(maxsize=2)(load_model)


@functools.lru_cache(maxsize=2)
def _tokenize(path: str | None, tokenizer: Any) -> list[int]:
    return tokenizer(read_text(path), add_special_tokens=False)["input_ids"]
