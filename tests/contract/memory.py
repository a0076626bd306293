"""Random traffic against the memory oracle: no step may read what was not written for it."""

from __future__ import annotations

from collections import Counter
from types import ModuleType
from typing import Any, ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from shared import SamplingParams
from tests.oracle import expected_output, install_oracle

NUM_SCHEDULES = 3000

# Prompts begin with a part of one of these, so that they share prefixes.
BASES = [[1] * 24, [2, 3] * 12, list(range(10, 34))]


class Traffic(RuleBasedStateMachine):
    """Requests arrive, are aborted and fail in any order; checked after every operation."""

    stage: ClassVar[ModuleType]
    model: ClassVar[Any]
    extra_options: ClassVar[dict[str, st.SearchStrategy]]
    seen: ClassVar[Counter]  # what happened in all schedules; an oracle that saw nothing is worth nothing

    @initialize(
        options=st.fixed_dictionaries(
            {
                "block_size": st.integers(1, 5),
                "num_blocks": st.integers(3, 9),
                "max_num_seqs": st.integers(1, 4),
                "max_num_batched_tokens": st.integers(6, 24),
                "max_model_len": st.just(32),
            }
        ),
        extra=st.data(),
    )
    def start(self, options: dict[str, int], extra: st.DataObject) -> None:
        for name, strategy in self.extra_options.items():
            options[name] = extra.draw(strategy, name)
        self.options = options
        self.engine = self.stage.LLMEngine(model=self.model, **options)
        self.engine.trace.record_blocks = True
        self.oracle = install_oracle(self.engine)
        self.expected: dict[str, list[int]] = {}  # live request -> the tokens it must get
        self.may_fail = False
        self.seen["schedules"] += 1

    @rule(
        base=st.sampled_from(BASES),
        num_shared=st.integers(0, 12),
        tail=st.lists(st.integers(5, 8), max_size=8),
        max_tokens=st.integers(1, 12),
    )
    def add(self, base: list[int], num_shared: int, tail: list[int], max_tokens: int) -> None:
        prompt = base[:num_shared] + tail
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        free = self.engine.block_manager.num_free_blocks
        try:
            request_id = self.engine.add_request(prompt, params)
        except ValueError:
            assert self.engine.block_manager.num_free_blocks == free, "a refusal changed the pool"
            self.seen["refused"] += 1
            return
        self.expected[request_id] = expected_output(prompt, max_tokens, self.oracle.vocab_size)

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.expected)), "abort")
        assert self.engine.abort_request(request_id)
        assert not self.engine.abort_request(request_id), "a second abort must find nothing"
        self.seen["aborted"] += 1

    @rule()
    def fail_next(self) -> None:
        self.oracle.fail_next = self.may_fail = True

    @rule(num_steps=st.integers(1, 4))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step()

    def _step(self) -> None:
        busy = self.engine.scheduler.has_unfinished()
        forwards, recorded = self.oracle.num_forwards, len(self.engine.trace.steps)
        for output in self.engine.step():
            expected = self.expected[output.request_id]
            got = list(output.token_ids)
            assert got == expected[: len(got)], (
                f"request {output.request_id} got {got}, expected {expected}: it was sampled at "
                "the wrong place or from another sequence's tokens"
            )
            if output.finished:
                del self.expected[output.request_id]
                self.seen[output.finish_reason] += 1
                if output.finish_reason == "length":
                    assert len(got) == len(expected)
                else:
                    assert output.finish_reason == "abort" or self.may_fail, output
        if busy:
            assert self.oracle.num_forwards == forwards + 1, (
                "requests are unfinished, but the step computed nothing: a deadlock"
            )
        for record in self.engine.trace.steps[recorded:]:
            self._check_record(record)

    def _check_record(self, record: Any) -> None:
        options, tables = self.options, record.block_tables
        held = {block for table in tables.values() for block in table}
        assert len(held) + record.num_free_blocks == options["num_blocks"], (
            f"step {record.index}: {len(held)} blocks are in tables, {record.num_free_blocks} are "
            f"free, the pool has {options['num_blocks']}"
        )
        assert all(len(set(table)) == len(table) for table in tables.values())
        holders = sum(bool(table) for table in tables.values())
        assert holders <= options["max_num_seqs"], f"{holders} sequences hold blocks"
        over = record.num_tokens > options["max_num_batched_tokens"]
        assert not over or len(record.slices) == 1, (
            f"step {record.index} computes {record.num_tokens} tokens in several slices"
        )
        self.seen["preempted"] += len(record.preempted)
        self.seen["mixed"] += len({n for _, _, n in record.slices}) > 1

    @invariant()
    def pool_is_sound(self) -> None:
        if not hasattr(self, "engine"):
            return
        manager = self.engine.block_manager
        assert 0 <= manager.num_free_blocks <= manager.num_blocks
        if not self.engine.scheduler.has_unfinished():
            assert manager.num_free_blocks == manager.num_blocks, "nothing runs, blocks are missing"

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(500):
            if not self.engine.has_unfinished_requests():
                break
            self._step()
        assert not self.expected, f"after 500 more steps still unfinished: {self.expected}"
        self.pool_is_sound()
        self.seen["reads"] += self.oracle.num_reads


@pytest.mark.slow
def test_memory_oracle(
    stage: ModuleType, tiny: Any, request: pytest.FixtureRequest, oracle_options: dict
) -> None:
    """Design invariants 1 to 4 under random traffic, tiny pools, aborts and failing forwards."""
    num_schedules = NUM_SCHEDULES * (10 if request.config.getoption("--long") else 1)

    class StageTraffic(Traffic):
        pass

    StageTraffic.stage, StageTraffic.model = stage, tiny
    StageTraffic.extra_options, StageTraffic.seen = oracle_options, Counter()
    run_machine(
        StageTraffic,
        settings=settings(
            max_examples=num_schedules,
            stateful_step_count=20,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    seen = StageTraffic.seen
    print(f"\n{stage.__name__}: {dict(seen)}")
    assert seen["schedules"] >= num_schedules * 0.9
    for event in "refused aborted error length preempted mixed reads".split():
        assert seen[event] > 0, f"no schedule had the event {event!r}: {dict(seen)}"


@pytest.fixture
def oracle_options() -> dict[str, st.SearchStrategy]:
    """Options of a stage that the random schedules draw as well; a stage may override this."""
    return {}
