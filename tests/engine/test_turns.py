"""Turns of several threads, and the changes between them."""

from __future__ import annotations

import copy
import threading
from types import SimpleNamespace

from shared.engine.turns import Turns


def test_a_change_is_made_at_once_or_at_the_end_of_the_turn():
    turns, made = Turns(), []
    turns.change(lambda: made.append(1))
    assert made == [1]
    with turns.take():
        turns.change(lambda: made.append(2))
        turns.change(lambda: made.append(3))
        assert made == [1] and turns.has_changes
    assert made == [1, 2, 3] and not turns.has_changes


def test_who_waits_is_not_overtaken_by_who_had_the_turn():
    turns, order = Turns(), []

    def wait() -> None:
        with turns.take():
            order.append("waiting")

    thread = threading.Thread(target=wait)
    with turns.take():
        thread.start()
        while not turns._next.locked():
            pass
    with turns.take():
        order.append("again")
    thread.join(60)
    assert order == ["waiting", "again"]


def test_a_model_has_its_turns_and_its_copy_others():
    model = SimpleNamespace()
    assert Turns.of(model) is Turns.of(model)
    assert Turns.of(copy.deepcopy(model)) is not Turns.of(model)
