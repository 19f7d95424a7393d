"""A child's side of a channel: what it reads, and what cannot disturb it."""

import subprocess

from flotilla_common.process.child_environment import child_environment
from flotilla_common.process.python_command import python_command

_CHILD = """
import os, sys
from flotilla_common.process.parent_channel import ParentChannel
parent = ParentChannel()
print("noise")
os.system("echo more noise; cat")
for line in parent.read_lines():
    parent.write(line)
parent.write(f"{len(sys.stdin.read())} left\\n".encode())
"""


def test_a_child_reads_whole_lines_and_no_print_disturbs_its_answers() -> None:
    done = subprocess.run(
        python_command("-c", _CHILD),
        input=b"one\ntwo\nhalf",
        capture_output=True,
        check=True,
        timeout=60,
        env=child_environment(ours=True),
    )
    assert done.stdout == b"one\ntwo\n0 left\n"
    assert sorted(done.stderr.split(b"\n")) == [b"", b"more noise", b"noise"]
