"""Many requests through each stage, and nothing may be left of them: no block, object or byte.

The engine is a stage's own; only its model runner is replaced, by one that computes nothing. Pools
are tiny and large in turn, requests come in bursts, of random lengths and salts; they are aborted
in every state and at every point of a step, by the thread that steps and by others; streams are
closed half-way, forwards fail and are interrupted. With `--model` the
model computes, too, and fewer requests come.

Whenever an engine has become idle, all blocks must be free and no sequence and no request may live
on. In between, every token must be the one of its place, every request must end once and for the
right reason, and none may wait forever: the oldest request advances in every step, or in every
other one where whole prompts are steps of their own.

Above its lowest after a quarter of the requests, resident memory may grow by no more than `SLACK`
bytes, which an allocator may keep whatever comes, and `PER_REQUEST` for each request. A request
that is kept weighs more: its lists of tokens and the objects around them are 1,500 bytes or more.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import logging
import random
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import psutil
import torch
from rich.console import Console

from shared import RequestOutput, SamplingParams, load_stage
from shared.engine.outputs import Request
from shared.models import LoadedModel, load_model
from shared.programs.options import whole

from .options import Parser, add_stages

SLACK = 8 << 20
PER_REQUEST = 512
REQUESTS, MODEL_REQUESTS, QUICK_SHARE = 20_000, 500, 20
ROUND = 250  # requests between two times that an engine becomes idle
MOST_LIVE = 100
LONGEST_PROMPT, MOST_TOKENS = 40, 12
STOP_TOKEN_IDS = list(range(60))
SALTS = ("", "a", "b")
STATES = ("waiting", "prefilling", "running", "preempted")  # when they are aborted
# Before and after these calls of a step a request may be aborted. None is the engine.
POINTS = (
    ("scheduler", "schedule"),
    ("model_runner", "run"),
    ("sampler", "sample"),
    ("scheduler", "commit"),
    ("trace", "add"),
    (None, "_deliver"),
)
ABORT_CHANCE = 0.002  # at each point
# A pool for little more than one request, and one for all.
POOLS: dict[str, dict[str, int]] = {
    "tiny": {"block_size": 4, "num_blocks": 16, "max_num_seqs": 5, "max_num_batched_tokens": 64},
    "large": {"block_size": 16, "num_blocks": 512, "max_num_seqs": 32},
}


class Lost(RuntimeError):
    """Something was kept, stuck or wrong; says what."""


class Failure(Exception):
    """What the runner raises, as a failing kernel would."""


class Runner:
    """Stands before an engine's model runner: fails now and then, and computes only if it must."""

    def __init__(self, runner: Any, rng: random.Random, computes: bool) -> None:
        self.runner, self.rng, self.computes = runner, rng, computes
        self.num_failures = 0
        self.vocab_size = runner.shape.vocab_size

    def run(self, batch: Any) -> torch.Tensor:
        """Logits `[len(batch.sampling), vocab_size]`; each row has one token, that of its place."""
        if self.computes:
            logits = self.runner.run(batch)
        else:
            logits = torch.zeros(len(batch.sampling), self.vocab_size)
            for row, sequence in enumerate(batch.sampling):
                place = token_at(sequence.request_id, sequence.num_tokens, self.vocab_size)
                logits[row, place] = 1000
        chance = self.rng.random()
        if chance < 0.02:
            self.num_failures += 1
            raise KeyboardInterrupt if chance < 0.005 else Failure
        return logits


def token_at(request_id: str, position: int, vocab_size: int) -> int:
    """The only right token at a position of a request, prompt included."""
    return zlib.crc32(f"{request_id} {position}".encode()) % vocab_size


class Soak:
    """One engine, and what must come out of it.

    Attributes:
        seen: how often what happened.
    """

    def __init__(
        self, stage: ModuleType, loaded: LoadedModel, pool: str, rng: random.Random, computes: bool
    ) -> None:
        options = dict(POOLS[pool])
        if hasattr(stage.EngineConfig, "max_prefill_chunk_size"):
            options["max_prefill_chunk_size"] = 8
        self.engine = stage.LLMEngine(model=(loaded.model, None), **options)
        self.engine.trace.max_steps = 100  # what a trace keeps is no leak
        self.engine.model_runner = self.runner = Runner(self.engine.model_runner, rng, computes)
        self.kinds = (stage.sequence.Sequence, Request)
        self.num_before = count_objects(self.kinds)
        self.rng = rng
        self.has_salts = "cache_salt" in inspect.signature(self.engine.add_request).parameters
        self.expected: dict[str, tuple[int, SamplingParams]] = {}  # prompt tokens, parameters
        self.aborted: set[str] = set()
        self.num_failures = 0  # of which we have seen the outputs
        self.seen: Counter[str] = Counter()
        for part, method in POINTS:
            self.abort_around(getattr(self.engine, part) if part else self.engine, method)

    def abort_around(self, owner: Any, method: str) -> None:
        """Abort a request, now and then, before or after each call of `owner.method`."""
        original = getattr(owner, method)

        def around(*args: Any) -> Any:
            self.abort_in_step()
            result = original(*args)
            self.abort_in_step()
            return result

        setattr(owner, method, around)

    def abort_in_step(self) -> None:
        """With a small chance, abort a request while a step runs, from this thread or another."""
        if self.rng.random() > ABORT_CHANCE:
            return
        live = [name for name in self.expected if name not in self.aborted]
        if not live:
            return
        name = self.rng.choice(live)
        answers: list[bool] = []
        thread = threading.Thread(target=lambda: answers.append(self.engine.abort_request(name)))
        if self.rng.random() < 0.5:
            answers.append(self.engine.abort_request(name))
        else:
            thread.start()
            thread.join(timeout=60)
            if not answers:
                raise Lost(f"abort_request({name!r}) waits for the step, in another thread")
        if answers[0]:  # else it has ended, and its last output is on its way
            self.aborted.add(name)
            self.seen["in a step"] += 1

    def round(self, num_requests: int) -> None:
        """Serve that many requests to their ends; the engine is idle afterwards."""
        left = num_requests
        while left:
            for _ in range(min(left, self.rng.choice([1, 1, 1, 2, 5, 20]))):
                left -= 1
                self.add()
            if self.rng.random() < 0.3:
                self.abort()
            for _ in range(self.rng.choice([0, 1, 1, 3])):
                self.step()
            while len(self.expected) > MOST_LIVE:
                self.step()
        num_tokens = sum(n + (params.max_tokens or 0) for n, params in self.expected.values())
        steps_left = 2 * num_tokens + 1
        while self.engine.has_unfinished_requests() and steps_left:
            failures = self.runner.num_failures
            self.step()
            steps_left -= self.runner.num_failures == failures
        self.check_idle()

    def add(self) -> None:
        """One more request, which may be one that must be refused, or a stream."""
        rng, vocab_size = self.rng, self.runner.vocab_size
        prompt = [rng.choice([7, 8])] * rng.randint(1, LONGEST_PROMPT - 4)
        prompt += rng.choices(range(100, 110), k=rng.randint(1, 4))
        params = SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            max_tokens=rng.randint(1, MOST_TOKENS),
            stop_token_ids=rng.choice([None, STOP_TOKEN_IDS]),
            logprobs=rng.choice([None, None, 2]),
            seed=rng.choice([None, 0]),
            ignore_eos=True,
        )
        self.seen["requests"] += 1
        kind = rng.random()
        if kind < 0.02:
            try:
                self.engine.add_request(prompt + [vocab_size], params)
            except ValueError:
                self.seen["refused"] += 1
                return
            raise Lost(f"token id {vocab_size} was taken, the vocabulary has {vocab_size}")
        if kind < 0.04:
            self.stream(prompt, params)
            return
        salt = {"cache_salt": rng.choice(SALTS)} if self.has_salts else {}
        request_id = self.engine.add_request(prompt, params, **salt)
        self.expected[request_id] = (len(prompt), params)

    def stream(self, prompt: list[int], params: SamplingParams) -> None:
        """Read some outputs of a stream, or all, and close it."""
        outputs = self.engine.stream(prompt, params)
        try:
            for output in outputs:
                self.check_tokens(output, len(prompt))
                if self.rng.random() < 0.2:
                    break
        except KeyboardInterrupt:
            pass
        outputs.close()
        self.seen["streams"] += 1

    def abort(self) -> None:
        """Abort a request: of a few, the one whose state was aborted least often so far."""
        live = [name for name in self.expected if name not in self.aborted]
        states = {name: self.state(name) for name in self.rng.sample(live, min(8, len(live)))}
        states = {name: state for name, state in states.items() if state}
        if not states:
            return
        request_id = min(states, key=lambda name: self.seen[states[name]])
        if not self.engine.abort_request(request_id) or self.engine.abort_request(request_id):
            raise Lost(f"{request_id!r} was live, and could not be aborted exactly once")
        self.aborted.add(request_id)
        self.seen[states[request_id]] += 1

    def state(self, request_id: str) -> str:
        """One of `STATES`; "" if it has ended while a stream was read."""
        how_far = self.engine.progress(request_id)
        if how_far is None:
            return ""
        lost_blocks = how_far["state"] == "waiting" and how_far["generated_tokens"]
        return "preempted" if lost_blocks else how_far["state"]

    def step(self) -> None:
        """One step of the engine; a Ctrl-C in it changes nothing."""
        self.seen["steps"] += 1
        try:
            outputs = self.engine.step()
        except KeyboardInterrupt:
            self.seen["interrupted"] += 1
            return
        failed = self.runner.num_failures > self.num_failures  # a stream's steps count as well
        self.num_failures = self.runner.num_failures
        for output in outputs:
            self.check(output, failed)

    def check(self, output: RequestOutput, failed: bool) -> None:
        """It must be of a live request, with the right tokens, and end for the right reason."""
        name = output.request_id
        if name not in self.expected:
            raise Lost(f"{name!r} has ended, or never began, and yet there is an output of it")
        num_prompt_tokens, params = self.expected[name]
        self.check_tokens(output, num_prompt_tokens)
        if not output.finished:
            return
        del self.expected[name]
        reason, token_ids = output.finish_reason, output.token_ids
        ends = [i for i, token in enumerate(token_ids, 1) if token in (params.stop_token_ids or ())]
        right = {
            "abort": name in self.aborted and not ends,
            "error": failed and not ends,
            "length": len(token_ids) == params.max_tokens and not ends,
            "stop": ends == [len(token_ids)],
        }
        if not right[str(reason)]:
            raise Lost(f"{name!r} ended with {reason!r} after the tokens {token_ids}: {params}")
        self.aborted.discard(name)
        self.seen[str(reason)] += 1

    def check_tokens(self, output: RequestOutput, num_prompt_tokens: int) -> None:
        """Raises Lost if a token is not that of its place; a model computes what it likes."""
        if self.runner.computes:
            return
        for i, token_id in enumerate(output.token_ids):
            right = token_at(output.request_id, num_prompt_tokens + i, self.runner.vocab_size)
            if token_id != right:
                raise Lost(f"{output.request_id!r} got {token_id} as its token {i}, not {right}")

    def check_idle(self) -> None:
        """Nothing may be left: of the requests, of their blocks, of what an engine keeps of them.

        Raises:
            Lost: there is.
        """
        engine, manager = self.engine, self.engine.block_manager
        stuck = [engine.progress(name) for name in self.expected]
        if stuck or engine.has_unfinished_requests():
            raise Lost(f"{len(stuck)} requests are stuck, the first: {stuck[:1]}")
        if manager.num_free_blocks != manager.num_blocks:
            raise Lost(f"{manager.num_free_blocks} of {manager.num_blocks} blocks are free")
        gc.collect()
        kept = count_objects(self.kinds) - self.num_before
        if kept > 0:
            raise Lost(f"{kept} sequences and requests live on that have ended")
        self.seen["preemptions"] = engine.stats()["preemptions"]


def count_objects(kinds: tuple[type, ...]) -> int:
    """How many objects of these very types live."""
    return sum(type(one) in kinds for one in gc.get_objects())


def soak(
    stage: ModuleType, loaded: LoadedModel, num_requests: int, seed: int, computes: bool
) -> str:
    """Send requests through a stage; return what happened, in a line.

    Raises:
        Lost: something was kept, stuck or wrong.
    """
    rng, process = random.Random(seed), psutil.Process()
    start = time.perf_counter()
    with quiet(stage):
        soaks = [Soak(stage, loaded, pool, rng, computes) for pool in POOLS]
        done, after, lowest, memory_now = 0, 0, 0, 0
        while done < num_requests:
            for one in soaks:
                count = min(ROUND, num_requests - done)
                try:
                    one.round(count)
                except Exception as error:
                    kind = "" if isinstance(error, Lost) else f"{type(error).__name__}: "
                    raise Lost(f"{kind}{error} (requests {done:,} to {done + count:,})") from error
                done += count
            if done >= num_requests / 4:
                memory_now = process.memory_info().rss
                lowest = min(lowest or memory_now, memory_now)  # an allocator gives back late
                after = after or done
    grown, bound = memory_now - lowest, SLACK + PER_REQUEST * (done - after)
    memory = f"memory {grown / 2**20:+.1f} MiB, at most {bound / 2**20:.1f}"
    if grown > bound:
        raise Lost(f"{memory}, from request {after:,} to {done:,}")
    seen = sum((one.seen for one in soaks), Counter())
    seconds = time.perf_counter() - start
    return f"{done:,} requests in {seconds:.0f} s: all blocks free, {memory}; {describe(seen)}"


def describe(seen: Counter[str]) -> str:
    """What happened how often, ends first."""
    states = [f"{seen[state]:,} {state}" for state in (*STATES, "in a step") if seen[state]]
    ends = [f"{seen[end]:,} {end}" for end in ("length", "stop", "error", "refused")]
    others = [
        f"{seen[what]:,} {what}" for what in ("preemptions", "interrupted", "streams", "steps")
    ]
    aborts = f"{seen['abort']:,} abort ({', '.join(states)})"
    return ", ".join([*ends, aborts]) + "; " + ", ".join(others)


@contextmanager
def quiet(stage: ModuleType) -> Iterator[None]:
    """Within, a stage does not log the steps that are made to fail."""
    logger = logging.getLogger(stage.__name__)
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def add_options(parser: Parser) -> None:
    """Its own options."""
    add_stages(parser, [1, 2, 3, 4])
    parser.add_argument("--quick", action="store_true", help="a twentieth of the requests")
    parser.add_argument("--model", help=f"compute, too, with this one; {MODEL_REQUESTS} requests")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda; of --model")
    parser.add_argument(
        "--requests", type=whole(1, 10_000_000), help=f"of each stage, default {REQUESTS:,}"
    )
    parser.add_argument("--seed", type=whole(0, 2**31), default=0)


def main(args: argparse.Namespace, console: Console) -> int:
    """Print a line for each stage. Returns 1 if any lost something."""
    loaded = load_model(args.model or "tiny", device=args.device if args.model else "cpu")
    usual = (MODEL_REQUESTS if args.model else REQUESTS) // (QUICK_SHARE if args.quick else 1)
    code = 0
    for number in args.stages:
        try:
            said = soak(
                load_stage(number), loaded, args.requests or usual, args.seed, bool(args.model)
            )
        except Lost as error:
            said, code = f"FAILED: {error}", 1
        line = f"stage {number:02d}: {said}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return code
