"""Several simulated engines behind a router, each with its own clock.

A router sees a request when it is due, with all replicas as they stand then, and sends it to one of
them, where it stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shared.engine.outputs import RequestOutput

from .runner import params_of
from .simulator import SimulatedEngine
from .workloads import Workload

Engines = Sequence[SimulatedEngine]
# Replicas, how many requests each has under way, and a prompt to the index of a replica.
Route = Callable[[Engines, list[int], list[int]], int]


def round_robin() -> Route:
    """One after another, whatever they hold."""
    turn = -1

    def route(engines: Engines, loads: list[int], prompt: list[int]) -> int:
        nonlocal turn
        turn = (turn + 1) % len(engines)
        return turn

    return route


def prefix_aware(slack: int = 8) -> Route:
    """Where most of the prompt is cached, among those that are not much busier than the idlest.

    If no replica has it, the idlest gets it; of several, the one whose cache is emptiest.

    It looks into the caches themselves. Real routers keep a copy, from events of the engines (vLLM
    with llm-d) or from what they sent where (the router of SGLang), so they know a little less.

    Args:
        slack: requests that a replica may have more than the idlest one and still be chosen.

    Raises:
        ValueError: the replicas have no prefix cache (stages 01 and 02).
    """

    def route(engines: Engines, loads: list[int], prompt: list[int]) -> int:
        if not hasattr(engines[0].block_manager, "find_prefix"):
            raise ValueError("prefix-aware routing needs a prefix cache: stage 03 or 04")
        sequence = engines[0].new_sequence("", prompt, 1)  # it keeps its hashes for all replicas
        allowed = [i for i, load in enumerate(loads) if load <= min(loads) + slack]
        found = {i: len(engines[i].block_manager.find_prefix(sequence)) for i in allowed}
        cached = [engine.block_manager.num_cached_blocks for engine in engines]
        return max(allowed, key=lambda i: (found[i], -loads[i], -cached[i]))

    return route


def run_fleet(
    engines: Engines, workload: Workload, route: Route | None = None
) -> list[RequestOutput]:
    """Serve a workload whose arrivals are all known; return its outputs in their order.

    All clocks must read 0. Faster than `run_engine`, which asks after every token what is due.

    Args:
        route: default `round_robin`.

    Raises:
        ValueError: a request waits for another, or an engine has been used.
    """
    if any(request.after is not None for request in workload.requests):
        raise ValueError(f"{workload.name}: requests that wait for others have no known arrival")
    if any(engine.now for engine in engines):
        raise ValueError("an engine's clock does not read 0: it has been used")
    route = route or round_robin()
    outputs: dict[str, RequestOutput] = {}
    last: list[int] = [0] * len(engines)  # requests that ended with each engine's last step

    def run_until(i: int, due: float) -> int:
        """Make the steps that begin before `due`; return how many requests it has then."""
        engine = engines[i]
        while engine.has_unfinished_requests() and engine.now < due:
            ended = {o.request_id: o for o in engine.step() if o.finished}
            outputs.update(ended)
            last[i] = len(ended)
        under_way = last[i] if engine.now > due else 0  # that step has not ended yet
        return under_way + len(engine.scheduler.waiting) + len(engine.scheduler.running)

    for request in sorted(workload.requests, key=lambda request: request.arrival_time):
        # 1. All replicas run up to that moment. A step that has begun by then ends after it.
        loads = [run_until(i, request.arrival_time) for i in range(len(engines))]
        # 2. Somebody gets the request. An idle replica's time has not passed yet.
        prompt = list(request.prompt_token_ids)
        engine = engines[route(engines, loads, prompt)]
        engine.sleep(request.arrival_time - engine.now)
        engine.add_request(prompt, params_of(request), request.request_id)
    for i in range(len(engines)):
        run_until(i, float("inf"))
    for request in workload.requests:  # the clock counts from when they were due
        outputs[request.request_id].metrics.arrival_time = request.arrival_time
    return [outputs[request.request_id] for request in workload.requests]
