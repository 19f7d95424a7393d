"""Keeps torch out of processes that handle text alone.

transformers imports torch wherever it is installed, for tokenizers too: seconds, and hundreds of
megabytes, for nothing."""

import os
import sys


def hide_torch() -> None:
    """Have `import torch` fail in this process, as where it is not installed.

    Call it before the first import of transformers, which remembers what it found, and only in a
    process that is for text from its start to its end. Where torch is loaded already, it stays."""
    # As Python's own import does it for a module that must not be found.
    sys.modules.setdefault("torch", None)  # pyright: ignore[reportArgumentType]
    # Or transformers says on stderr that models need torch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
