"""Do all rows say the same? A fast row with other tokens has measured nothing.

In floating point the sum of the same terms in another order differs in its last bits, and where two
tokens' logits are that close, either is right. So the first difference of a request counts only if
the gap between the two logits, computed afresh, is more than rounding can explain. What follows it
is another text, and no longer comparable.

Knows finished requests and a model to compute a gap with; no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shared.engine.outputs import RequestOutput

# Largest gap of two logits that rounding explains, by the dtype of the model.
NEAR_TIE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}

Gap = Callable[[Sequence[int], int, int], float]


class Agreement:
    """Holds every row's tokens against those of the first one.

    Args:
        gap: the distance of two tokens' logits after given token ids.
        tolerance: the largest gap that counts as a tie, see `NEAR_TIE`.
    """

    def __init__(self, gap: Gap, tolerance: float) -> None:
        self._gap = gap
        self._tolerance = tolerance
        self._first: tuple[str, dict[str, RequestOutput]] | None = None
        self._gaps: dict[tuple[str, int, int, int], float] = {}  # each is computed once

    def check(self, row: str, outputs: Sequence[RequestOutput]) -> tuple[list[str], list[str]]:
        """Compare a row with the first one that was given: its failures, and its near ties."""
        mine = {output.request_id: output for output in outputs}
        if self._first is None:
            self._first = row, mine
            return [], []
        failures, ties = [], []
        first_row, theirs = self._first
        for request_id, output in mine.items():
            position = first_difference(theirs[request_id].token_ids, output.token_ids)
            if position is None:
                continue
            where = f"{row} differs from {first_row} at token {position} of {request_id}"
            if theirs[request_id].prompt_token_ids != output.prompt_token_ids:
                continue  # a later turn of a conversation that has parted already
            ids = [theirs[request_id].token_ids, output.token_ids]
            if position >= min(map(len, ids)):
                failures.append(f"{where}: {len(ids[0])} and {len(ids[1])} tokens")
                continue
            gap = self._gap_at(theirs[request_id], position, output.token_ids[position])
            if gap > self._tolerance:
                failures.append(f"{where}: logit gap {gap:.2g}, over {self._tolerance:g}")
            else:
                ties.append(f"{where}: a tie, logit gap {gap:.2g}")
        return failures, ties

    def _gap_at(self, output: RequestOutput, position: int, other: int) -> float:
        one = output.token_ids[position]
        key = (output.request_id, position, one, other)
        if key not in self._gaps:
            before = [*output.prompt_token_ids, *output.token_ids[:position]]
            self._gaps[key] = self._gap(before, one, other)
        return self._gaps[key]


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first position where two lists differ, the end of the shorter one included."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return None if len(one) == len(other) else min(len(one), len(other))
