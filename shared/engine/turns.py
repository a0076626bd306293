"""Whose turn it is to change the engines of one model, when several threads use them.

Knows nothing of engines: a change is a function without arguments.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Turns:
    """One turn after another, and between two of them the changes that were asked for meanwhile.

    Engines that share a model share its turns, since a step sets the model's attention and then
    runs it. A step is a turn. What must not wait for a step, such as an abort, is a change: it is
    made at once if no thread has the turn, else at the end of the turn. Asking for a change never
    waits. So it is safe at any point of any thread, even in a garbage collector that closes a
    forgotten iterator in the middle of a step.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # its holder has the turn
        self._next = threading.Lock()  # its holder has the next turn, so none overtakes
        self._thread: int | None = None  # which has the turn
        self._process = os.getpid()
        self._changes: deque[Callable[[], object]] = deque()

    def __reduce__(self) -> tuple[Any, ...]:
        return Turns, ()  # a copy of a model has turns of its own

    @classmethod
    def of(cls, model: Any) -> Turns:
        """The turns of all engines of `model`, which keeps them."""
        turns: Turns = model.__dict__.setdefault("_engine_turns", cls())  # one atomic operation
        turns.check_process()
        return turns

    def check_process(self) -> None:
        """Raise RuntimeError in a process that was forked off after the model was first used.

        Only the forking thread lives on there, and the thread pools of torch and Numba do not: a
        forward would hang or crash.
        """
        if self._process != os.getpid():
            raise RuntimeError(
                f"this model has an engine in process {self._process}, from which process "
                f"{os.getpid()} was forked: an engine does not survive a fork; start processes "
                'with the method "spawn" and load the model in each'
            )

    @property
    def has_changes(self) -> bool:
        """Whether changes wait for the end of a turn."""
        return bool(self._changes)

    @contextmanager
    def take(self) -> Iterator[None]:
        """Wait for the turn and hold it; changes are made before and after.

        Raises:
            RuntimeError: this thread has the turn already, or a fork took the process away.
        """
        self.check_process()
        if self._thread == threading.get_ident():
            raise RuntimeError("a step was started during a step, by the same thread")
        with self._next:
            self._lock.acquire()
        try:
            self._thread = threading.get_ident()
            self.catch_up()
            yield
        finally:
            self._thread = None
            self._lock.release()
            self._try_to_catch_up()

    def change(self, what: Callable[[], object]) -> None:
        """Make a change: now, or at the end of the turn that a thread has. Never waits."""
        self._changes.append(what)
        self._try_to_catch_up()

    def catch_up(self) -> None:
        """Make all waiting changes, in order. Only for the thread that has the turn."""
        while self._changes:
            self._changes.popleft()()

    # After each release the changes are looked at again: one that came a moment before was left
    # to us by a thread that did not get the lock.
    def _try_to_catch_up(self) -> None:
        while self._changes and self._lock.acquire(blocking=False):
            try:
                self._thread = threading.get_ident()
                self.catch_up()
            finally:
                self._thread = None
                self._lock.release()
