"""Random traffic against the memory oracle: no step may read what was not written for it.

A schedule is a list of operations, which hypothesis draws as a string of bytes: that is several
times faster than a state machine, so that thousands of schedules take no longer than a coffee. A
failing one is reduced and printed as a few operations.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, given, note, settings

from shared import SamplingParams
from tests.oracle import MAX_MODEL_LEN, OracleModel, expected_output

from .helpers import describe, poison_cache

NUM_SCHEDULES = 1000

# Prompts begin with a part of one of these, so that they share prefixes.
BASES = [[1] * 24, [2, 3] * 12, list(range(10, 34))]

# A part of the oracle's language; requests that may stop end at one of these.
STOP_TOKEN_IDS = list(range(60))

# What the engine's options may be; `num_blocks` comes from the tokens that the pool shall hold.
OPTIONS = {
    "block_size": [1, 2, 3, 4, 5],
    "max_num_seqs": [2, 3, 4, 5],
    "max_num_batched_tokens": list(range(10, 25)),
    "max_model_len": [MAX_MODEL_LEN],
}
POOL_TOKENS = list(range(20, 41))


class Add(NamedTuple):
    base: int
    num_shared: int  # tokens of the base
    num_own: int  # tokens behind it
    own: int  # the first of those
    max_tokens: int
    may_stop: bool
    extra: dict[str, Any]


class Abort(NamedTuple):
    index: int  # of a live request, counted around


class Fail(NamedTuple):
    """The next forward raises in the middle."""


class Step(NamedTuple):
    count: int


Operation = Add | Abort | Fail | Step


class Schedule(NamedTuple):
    options: dict[str, Any]
    operations: list[Operation]


def read_schedule(
    data: bytes, options: dict[str, list[Any]], request_options: dict[str, list[Any]]
) -> Schedule:
    """The schedule that a string of bytes stands for: one byte for each choice.

    Bytes are what hypothesis draws fastest, and a failing string is reduced to a short one of
    small bytes: few operations, the first choice of everything.
    """
    position = 0

    def choose(choices: Sequence[Any]) -> Any:
        nonlocal position
        position += 1
        return choices[data[position - 1] % len(choices)] if position <= len(data) else choices[0]

    def choose_each(choices: dict[str, list[Any]]) -> dict[str, Any]:
        return {name: choose(choices[name]) for name in choices}

    chosen = choose_each(OPTIONS | options)
    chosen["num_blocks"] = choose(POOL_TOKENS) // chosen["block_size"]
    operations: list[Operation] = []
    while position < len(data):
        kind = choose(range(16))
        if kind < 7:
            operations.append(Step(count=1 + choose(range(4))))
        elif kind < 13:
            add = Add(
                base=choose(range(len(BASES))),
                num_shared=choose(range(11)),
                num_own=choose(range(1, 6)),
                own=choose([40, 41, 42]),
                max_tokens=choose(range(1, 17)),
                may_stop=choose([False, False, True]),
                extra=choose_each(request_options),
            )
            operations.append(add)
        else:
            operations.append(Abort(index=choose(range(8))) if kind < 15 else Fail())
    return Schedule(chosen, operations)


class LastException(logging.Handler):
    """Takes an engine's log, and keeps what ended its last failing step."""

    exception: BaseException | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.exception = record.exc_info[1]


class Traffic:
    """An engine with the oracle inside, and what must come out of it."""

    def __init__(
        self, stage: ModuleType, oracle: OracleModel, options: dict[str, Any], log: LastException
    ) -> None:
        self.oracle, self.options, self.log = oracle, options, log
        self.engine = stage.LLMEngine(model=(oracle, None), **options)
        poison_cache(self.engine)
        oracle.reset()  # what a warm-up may have done does not count
        self.engine.trace.record_blocks = True
        self.expected: dict[str, tuple[list[int], str]] = {}  # of those without a last output
        self.aborted: set[str] = set()  # of these, the ones that were aborted
        self.seen: Counter = Counter(schedules=1)

    def run(self, operations: list[Operation]) -> None:
        for operation in operations:
            if isinstance(operation, Step):
                for _ in range(operation.count):
                    self.step()
            elif isinstance(operation, Add):
                self.add(operation)
            elif isinstance(operation, Abort):
                self.abort(operation.index)
            else:
                self.oracle.fail_next = True
            self.check_pool()
        self.oracle.fail_next = False
        for _ in range(500):
            if not self.engine.has_unfinished_requests():
                break
            self.step()
        assert not self.expected, f"500 more steps did not finish the requests {self.expected}"
        self.check_pool()

    def add(self, add: Add) -> None:
        prompt = BASES[add.base][: add.num_shared] + [add.own + i for i in range(add.num_own)]
        params = SamplingParams(
            temperature=0,
            max_tokens=add.max_tokens,
            ignore_eos=True,
            stop_token_ids=STOP_TOKEN_IDS if add.may_stop else None,
        )
        free = self.engine.block_manager.num_free_blocks
        try:
            request_id = self.engine.add_request(prompt, params, **add.extra)
        except ValueError:
            now_free = self.engine.block_manager.num_free_blocks
            assert now_free == free, f"a refused request took {free - now_free} blocks"
            self.seen["refused"] += 1
            return
        tokens = expected_output(prompt, add.max_tokens)
        ends = [i for i, token in enumerate(tokens) if token in STOP_TOKEN_IDS]
        if add.may_stop and ends:
            tokens = tokens[: ends[0] + 1]
            self.expected[request_id] = (tokens, "stop")
        else:
            self.expected[request_id] = (tokens, "length")

    @property
    def live(self) -> list[str]:
        return [request_id for request_id in self.expected if request_id not in self.aborted]

    def abort(self, index: int) -> None:
        if not self.live:
            return
        request_id = self.live[index % len(self.live)]
        assert self.engine.abort_request(request_id), (
            f"{request_id!r} lives; abort says it does not"
        )
        assert not self.engine.abort_request(request_id), "a second abort must find nothing"
        self.aborted.add(request_id)

    def step(self) -> None:
        live, num_forwards = self.live, len(self.oracle.step_rows)
        num_records, failing = len(self.engine.trace.steps), self.oracle.fail_next
        outputs = self.engine.step()
        num_forwards = len(self.oracle.step_rows) - num_forwards
        records = self.engine.trace.steps[num_records:]
        where = "; ".join(map(describe, records)) or "a step that left no record"
        assert not self.oracle.faults, f"{where}: {'; '.join(self.oracle.faults)}"
        for output in outputs:
            self.check_output(output, failing)
        assert num_forwards == bool(live), (
            f"{len(live)} requests were unfinished, and the step did {num_forwards} forwards: "
            + ("a deadlock" if live else "there was nothing to compute")
        )
        assert len(records) == (num_forwards if not failing else 0), (
            f"{num_forwards} forwards left {len(records)} records in the trace"
        )
        for record in records:
            self.check_record(record)
        self.seen["steps"] += 1

    def check_output(self, output: Any, failing: bool) -> None:
        request_id, got = output.request_id, list(output.token_ids)
        assert request_id in self.expected, f"{request_id!r} has had its last output: {output}"
        expected, end = self.expected[request_id]
        assert got == expected[: len(got)], (
            f"request {request_id!r} got the tokens {got}, expected {expected}: a token was "
            "sampled in the wrong place, or given to the wrong request"
        )
        if not output.finished:
            return
        reason = output.finish_reason
        if request_id in self.aborted:
            assert reason == "abort", f"{request_id!r} was aborted and ended with {reason!r}"
            self.aborted.remove(request_id)
        elif reason == "error":
            assert failing, f"{request_id!r} was ended by {self.log.exception!r}"
        else:
            assert (got, reason) == (expected, end), (
                f"request {request_id!r} ended with {reason!r} after the tokens {got}, expected "
                f"{end!r} after {expected}"
            )
        del self.expected[request_id]
        self.seen[reason] += 1

    def check_record(self, record: Any) -> None:
        tables = record.block_tables
        held = {block for table in tables.values() for block in table}
        num_blocks, max_num_seqs = self.options["num_blocks"], self.options["max_num_seqs"]
        assert len(held) + record.num_free_blocks == num_blocks, (
            f"step {record.index}: {len(held)} blocks are in block tables and "
            f"{record.num_free_blocks} are free, but the pool has {num_blocks}: {tables}"
        )
        for request_id, table in tables.items():
            assert len(set(table)) == len(table), (
                f"step {record.index}: the table of {request_id!r} has a block twice: {table}"
            )
        holders = [request_id for request_id, table in tables.items() if table]
        assert len(holders) <= max_num_seqs, (
            f"step {record.index}: {holders} hold blocks, max_num_seqs is {max_num_seqs}"
        )
        # A preempted request may have outgrown the budget; it is then computed alone.
        assert (
            record.num_tokens <= self.options["max_num_batched_tokens"] or len(record.slices) == 1
        ), f"step {record.index} computes {record.num_tokens} tokens: {record.slices}"
        self.seen["preempted"] += len(record.preempted)
        self.seen["shared steps"] += len(record.slices) > 1
        self.seen["tokens"] += record.num_tokens

    def check_pool(self) -> None:
        manager = self.engine.block_manager
        assert 0 <= manager.num_free_blocks <= manager.num_blocks, (
            f"{manager.num_free_blocks} of {manager.num_blocks} blocks are free"
        )
        assert self.live or manager.num_free_blocks == manager.num_blocks, (
            f"nothing runs, yet only {manager.num_free_blocks} of {manager.num_blocks} blocks are "
            "free"
        )


def run_schedules(
    stage: ModuleType,
    num_schedules: int,
    options: dict[str, list[Any]] | None = None,
    request_options: dict[str, list[Any]] | None = None,
    length: int = 70,
    reduce: bool = True,
) -> Counter:
    """Drive the stage's engine through random schedules; return how often what happened.

    Args:
        options, request_options: further arguments of the engine and of `add_request`, each with
            its choices.
        length: most bytes of a schedule, of which a request takes about eight.
        reduce: look for the smallest schedule that fails, which takes most of the time.
    """
    oracle, seen, log = OracleModel(), Counter(), LastException()

    @settings(
        max_examples=num_schedules,
        deadline=None,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        phases=tuple(Phase) if reduce else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.binary(min_size=25, max_size=length))
    def run(data: bytes) -> None:
        schedule = read_schedule(data, options or {}, request_options or {})
        note(schedule)
        traffic = Traffic(stage, oracle, schedule.options, log)
        traffic.run(schedule.operations)
        seen.update(traffic.seen)

    logger = logging.getLogger(stage.__name__)
    logger.addHandler(log)
    logger.propagate = False  # thousands of tracebacks of steps that were made to fail
    try:
        with probed_once(stage):
            run()
    finally:
        logger.propagate = True
        logger.removeHandler(log)
    return seen


def probed_once(stage: ModuleType) -> AbstractContextManager[Any]:
    """Within, thousands of engines on one model share the probe that each makes when it is built.

    Only saves time: an engine that is built otherwise makes its probes.
    """
    runner = sys.modules.get(f"{stage.__name__}.model_runner")
    if runner is None or not hasattr(runner, "inspect_model"):
        return nullcontext()
    return patch.object(runner, "inspect_model", cache(runner.inspect_model))


@pytest.fixture
def oracle_options() -> dict[str, list[Any]]:
    """Options of a stage that the random schedules choose as well; a stage may override this."""
    return {}


@pytest.fixture
def oracle_request_options() -> dict[str, list[Any]]:
    """The same for arguments of `add_request`."""
    return {}


@pytest.mark.slow
def test_memory_oracle(
    stage: ModuleType,
    request: pytest.FixtureRequest,
    oracle_options: dict[str, list[Any]],
    oracle_request_options: dict[str, list[Any]],
) -> None:
    """Invariants 1 to 4 under random traffic: tiny pools, aborts, failing forwards, preemption."""
    num_schedules = NUM_SCHEDULES * (30 if request.config.getoption("--long") else 1)
    seen = run_schedules(stage, num_schedules, oracle_options, oracle_request_options)
    print(f"\n{stage.__name__}: {dict(seen)}")
    assert seen["schedules"] >= num_schedules
    for event in ("refused", "abort", "error", "stop", "length", "preempted", "shared steps"):
        assert seen[event] > 0.1 * num_schedules, f"{event!r} is too rare: {dict(seen)}"
