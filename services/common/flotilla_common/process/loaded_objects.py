"""Garbage collection for processes that load many objects and drop few in cycles."""

import gc

# Python's 700 are a few requests: it searches for cycles many times a second, and thousands of
# times while modules are imported.
_COLLECT_AFTER = 50_000


def collect_rarely() -> None:
    """Search for garbage after 50,000 new objects. Call it before heavy imports: those of vLLM take
    a sixth less time."""
    gc.set_threshold(_COLLECT_AFTER)


def freeze_loaded_objects() -> None:
    """Exclude all objects loaded so far from garbage collection.

    A full collection visits every object, hundreds of thousands with vLLM and transformers, and
    would block the event loop for 40 to 400 ms each time."""
    gc.collect()
    gc.freeze()
