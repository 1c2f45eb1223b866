"""What the rules for all tests take for a thread that was left behind."""

from __future__ import annotations

import threading

from tests.leftovers import has_ended


def test_a_thread_that_is_only_just_being_started_is_waited_for() -> None:
    """A server that is asked as a test ends is about to start one: Python lists it, and refuses to join it."""
    late = threading.Thread(target=threading.Event().wait, args=(0.02,))
    starter = threading.Timer(0.02, late.start)
    starter.start()
    assert has_ended(late, 5.0)
    assert late.ident is not None
    starter.join()


def test_a_thread_that_goes_on_or_never_starts_is_left_behind() -> None:
    over = threading.Event()
    running = threading.Thread(target=over.wait)
    running.start()
    assert not has_ended(running, 0.01)
    assert not has_ended(threading.Thread(target=over.wait), 0.01)
    over.set()
    assert has_ended(running, 5.0)
