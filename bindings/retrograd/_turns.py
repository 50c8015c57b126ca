"""Turns among processes: of those that miss the same plan at once, one makes it and the others wait for it.

A turn is a reservation in the plan store, which the kernel takes back from a process that ends, however it ends. A plan
is stored before the turn is given up, so whoever gets the turn next finds it. No turn is waited for longer than a
compile may take; then the plan is made without.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from retrograd import _lowering
from retrograd._load import C as _C

logger = logging.getLogger("retrograd")

# How often a waiting process asks for its turn, in seconds. Asking costs some file operations.
_PAUSE = 0.1


@dataclass(eq=False)
class _Wish:
    recording: Any
    plan: Future[Any]
    make: Callable[[], None]
    fail: Callable[[BaseException], None]
    deadline: float


class Turns:
    """One process's wishes for plans that other processes are making. The lock is held for look-ups only."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._wishes: list[_Wish] = []
        self._thread: threading.Thread | None = None
        self._stopped = False

    def take(
        self, recording: Any, plan: Future[Any], make: Callable[[], None], fail: Callable[[BaseException], None]
    ) -> None:
        """Sees to it that `plan` gets what another process stored, or calls `make()`, once, to make it in any case.

        Now, or on a thread of its own where another process is at it. The turn ends when `plan` is done. What goes
        wrong goes to `fail()`, which must see to `plan` too.
        """
        wish = _Wish(recording, plan, make, fail, time.monotonic() + _lowering.compile_timeout())
        if self._try(wish):
            return
        logger.debug("another process is making a plan for %s", recording.name)
        failed: BaseException | None = None
        with self._changed:
            if self._stopped:
                plan.set_exception(RuntimeError("the program is ending."))
                return
            self._wishes.append(wish)
            if self._thread is None:
                thread = threading.Thread(target=self._wait_for_all, name="retrograd-turns", daemon=True)
                try:
                    thread.start()  # it waits for the lock
                except BaseException as error:  # no threads left
                    self._wishes.remove(wish)
                    failed = error
                else:
                    self._thread = thread
        if failed is not None:
            fail(failed)

    def stop(self) -> None:
        """At exit, as a thread must not be inside libtorch when Python goes. Wishes are given up."""
        with self._changed:
            self._stopped = True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None:
            thread.join(10)
        for wish in self._wishes:
            wish.plan.set_exception(RuntimeError("the program is ending."))

    def _try(self, wish: _Wish) -> bool:
        """Whether it is over with waiting."""
        try:
            turn = _C.reserve_plan(wish.recording)
            if turn is not None and turn.held:
                wish.plan.add_done_callback(lambda _: turn.release())
                found = _C.find_plan(wish.recording)
                if found is not None:
                    wish.plan.set_result(found)
                    return True
            elif turn is not None and not turn.reason and time.monotonic() < wish.deadline:
                return False
            wish.make()
        except BaseException as error:  # the thread must go on with the other wishes
            wish.fail(error)
        return True

    def _wait_for_all(self) -> None:
        _C.this_thread_makes_plans()
        while True:
            with self._changed:
                if self._stopped or not self._wishes:
                    self._thread = None
                    return
                self._changed.wait(_PAUSE)
                wishes = list(self._wishes)
            for wish in wishes:
                if not self._stopped and self._try(wish):
                    with self._changed:
                        self._wishes.remove(wish)
