"""Objects that stay as long as the process: kept out of garbage collection."""

import gc


def freeze_loaded_objects() -> None:
    """Exclude all objects loaded so far from garbage collection.

    A full collection visits every object, hundreds of thousands with vLLM and transformers, and
    would block the event loop for 40 to 400 ms each time."""
    gc.collect()
    gc.freeze()
