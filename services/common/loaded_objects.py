"""Objects that stay as long as the process: kept out of garbage collection."""

import gc


def freeze_loaded_objects() -> None:
    """Keep what has been loaded by now out of garbage collection.

    A full collection goes through every object, hundreds of thousands with vLLM and transformers,
    and would hold the event loop for 40 to 400 ms whenever Python begins one."""
    gc.collect()
    gc.freeze()
