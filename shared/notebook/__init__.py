"""What the notebooks need in addition to an engine: the model, the running example, times.

`draw` makes pictures of traces and block tables, `puzzles` checks answers. Knows only the
public side of engines.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from shared.engine.trace import Trace
from shared.measure import results
from shared.measure.episode import DOCUMENT, Arrival, Episode, build_arrivals, serve
from shared.measure.example import DOCUMENT_TOKENS
from shared.measure.machine import machine_facts, place, timed
from shared.models import LoadedModel, load_model

__all__ = [
    "DOCUMENT",
    "committed",
    "decode_ms",
    "example",
    "first_step",
    "load",
    "machine",
    "play",
    "race",
    "slider",
]

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "assets" / "bench"


def load(name: str = "smollm2", device: str = "auto") -> LoadedModel:
    """The model of a notebook, one for all its engines; float32, so that no text is by chance.

    Without the progress bar of `transformers`.
    """
    logging.disable_progress_bar()
    return load_model(name, device=device, dtype="float32")


def machine(model: Any) -> str:
    """On what the numbers of this run were measured."""
    facts = machine_facts()
    if model.device.type != "cuda":
        facts["gpu"] = None
    dtype = str(model.dtype).removeprefix("torch.")
    return f"{place(facts)}; torch {torch.__version__}, {dtype}"


def example(
    tokenizer: Any, document_tokens: int = DOCUMENT_TOKENS, max_tokens: int = 64
) -> list[Arrival]:
    """The course's running example: chats A to D, then the document, as the demo builds them.

    Raises TypeError or ValueError for what is no tokenizer or no number of tokens.
    """
    if not hasattr(tokenizer, "encode") or isinstance(tokenizer, str):
        raise TypeError(f"an example needs a tokenizer, got {tokenizer!r}")
    if type(document_tokens) is not int or document_tokens < 1:
        raise ValueError(f"document_tokens must be a whole number from 1, got {document_tokens!r}")
    return build_arrivals(tokenizer, document_tokens, max_tokens)


def play(engine: Any, arrivals: list[Arrival]) -> Episode:
    """Serve all arrivals to their ends. The engine's trace then has their steps, and only those.

    Raises RuntimeError if a request failed.
    """
    engine.trace = Trace(record_blocks=True)
    name = type(engine).__module__.split(".")[1].partition("_")[0]
    title = f"stage {name}"
    return serve(engine, arrivals, title, title, lambda arrival: None, lambda outputs: None)


def first_step(trace: Trace, request_id: str) -> int:
    """Where in `trace.steps` something of a request is computed for the first time.

    Raises ValueError if it never is.
    """
    for i, record in enumerate(trace.steps):
        if any(name == request_id for name, _, _ in record.slices):
            return i
    raise ValueError(f"no step computes {request_id!r}; the trace has {len(trace.steps)} steps")


def decode_ms(trace: Trace, request_id: str, least: int = 4) -> tuple[float, float]:
    """Median milliseconds of the steps that only decode, without and with a request.

    Steps of fewer than `least` sequences do not count. Raises ValueError if there is no other.
    """
    times: dict[bool, list[float]] = {False: [], True: []}
    for record in trace.steps:
        if record.num_tokens == len(record.slices) >= least:
            times[any(name == request_id for name, _, _ in record.slices)].append(record.duration)
    for is_in, each in times.items():
        if not each:
            how = "with" if is_in else "without"
            raise ValueError(f"no step in which {least} sequences decode {how} {request_id!r}")
    return 1000 * statistics.median(times[False]), 1000 * statistics.median(times[True])


def race(
    calls: Mapping[str, Callable[[int], Any]], device: torch.device, rounds: int = 9
) -> dict[str, float]:
    """Median milliseconds of each call, which are made in turn. A call gets the round's number."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(-1, rounds):  # the first round only warms up
        for name, call in calls.items():
            taken = timed(functools.partial(call, max(i, 0)), device)
            if i >= 0:
                times[name].append(1000 * taken)
    return {name: statistics.median(each) for name, each in times.items()}


def slider(label: str, values: Sequence[Any], start: Any, show: Callable[[Any], Any]) -> None:
    """A slider over `values`, and below it what `show` returns for the value that it stands at.

    A run without a page (nbconvert) leaves what `show(start)` returns, and one line for the slider.
    Raises ValueError if `start` is none of the values.
    """
    if start not in values:
        raise ValueError(f"{label}: {start!r} is not one of {list(values)}")
    import ipywidgets  # here, since only notebooks have them
    from IPython.display import display

    widget = ipywidgets.SelectionSlider(
        options=values,
        value=start,
        description=label,
        continuous_update=False,  # it may run an engine
        style={"description_width": "initial"},
        layout={"width": "30em"},
    )
    said = {"text/plain": f"{label}: {start} (a slider, where the notebook runs)"}
    display(widget._repr_mimebundle_() | said, raw=True)
    place = display(show(start), display_id=True)
    widget.observe(lambda change: place.update(show(change["new"])), "value")


def committed(name: str) -> dict[str, Any] | None:
    """The result file of a benchmark that is part of the repository; None if there is none yet."""
    path = RESULTS / f"{name}.json"
    return results.load(path) if path.is_file() else None
