"""Objects loaded at start cost no garbage collection; later ones are collected."""

import json
import subprocess
import sys

PROGRAM = """
import gc, json, weakref
from flotilla_common.process.loaded_objects import freeze_loaded_objects

class Cycle:
    def __init__(self):
        self.itself = self

loaded = [Cycle() for _ in range(1000)]
lost = weakref.ref(Cycle())
freeze_loaded_objects()
seen = sum(isinstance(each, Cycle) for each in gc.get_objects())
later = weakref.ref(Cycle())
gc.collect()
print(json.dumps([seen, lost() is None, later() is None, len(loaded)]))
"""


def test_loaded_objects_are_searched_no_more_and_later_garbage_is_collected() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True)
    assert json.loads(done.stdout) == [0, True, True, 1000]
