"""What the rules for all tests take for a thread or a process that was left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import threading

import psutil

from tests.leftovers import descendants, has_ended, is_lasting, started_meanwhile


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


def test_children_of_children_are_found_and_only_while_they_live() -> None:
    shell = subprocess.Popen(["bash", "-c", "sleep 60 & wait"], start_new_session=True)
    try:
        while len(found := descendants()) < 2:
            assert shell.poll() is None
        assert found == {child for child in psutil.Process().children(recursive=True) if not is_lasting(child)}
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
    psutil.wait_procs(found, timeout=5)
    assert not found & descendants()


def test_what_a_shared_program_starts_later_is_not_a_tests_own() -> None:
    """A relay that its program starts again would be ended after each test, and be found after the next one."""
    shared = subprocess.Popen(["bash", "-c", "read; sleep 60 & wait"], stdin=subprocess.PIPE, start_new_session=True)
    own = None
    try:
        before = descendants()
        assert psutil.Process(shared.pid) in before
        assert shared.stdin is not None
        shared.stdin.write(b"\n")
        shared.stdin.flush()
        while not (of_shared := set(psutil.Process(shared.pid).children())):
            assert shared.poll() is None
        own = subprocess.Popen(["sleep", "60"])
        now = descendants()
        assert of_shared < now
        assert started_meanwhile(now, before) == {psutil.Process(own.pid)}
    finally:
        os.killpg(shared.pid, signal.SIGKILL)
        shared.communicate()
        if own is not None:
            own.kill()
            own.wait()
