"""Children of multiprocessing do not outlive a parent that is killed."""

import multiprocessing
import os
import sys
from multiprocessing import spawn
from multiprocessing.connection import Connection

import psutil
import pytest

from flotilla_common.process.tied_children import tie_children
from tests.support.started_process import start_process

# One that is tied, and one that was started behind the block.
_PARENT = """
import multiprocessing, time
from flotilla_common.process.tied_children import tie_children

if __name__ == "__main__":
    context = multiprocessing.get_context({method!r})
    made = [context.Process(target=time.sleep, args=(600,)) for _ in range(2)]
    with tie_children():
        made[0].start()
    made[1].start()
    print(*(each.pid for each in made), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_that_is_started_meanwhile_ends_with_a_parent_that_is_killed(method: str) -> None:
    command = [sys.executable, "-c", _PARENT.format(method=method)]
    parent, line = start_process(command)
    with parent:
        tied, other = (psutil.Process(int(pid)) for pid in line.split())
        parent.kill()
    try:
        assert not psutil.wait_procs([tied], timeout=30)[1]
        assert other.is_running(), "one from behind the block is left as it is"
    finally:
        other.kill()


def _send_interpreter(pipe: Connection) -> None:
    pipe.send((sys.executable, sys.prefix, os.getppid()))


def test_a_tied_child_is_of_the_same_interpreter_and_parent() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tie_children():
        child = context.Process(target=_send_interpreter, args=(there,))
        child.start()
    assert here.recv() == (sys.executable, sys.prefix, os.getpid())
    child.join()
    assert os.fsdecode(spawn.get_executable()) == sys.executable
