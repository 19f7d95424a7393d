"""Keeps torch out of processes that handle text alone.

transformers imports torch if it is installed, even for tokenizers: that wastes seconds and hundreds
of megabytes."""

import os
import sys


def hide_torch() -> None:
    """Make `import torch` fail in this process, as if it were not installed.

    Call it before the first import of transformers, which caches the result, and only in a process
    that never needs tensors. If torch is already loaded, it stays loaded."""
    # None is Python's own marker for a module that must not be found.
    sys.modules.setdefault("torch", None)  # pyright: ignore[reportArgumentType]
    # Otherwise transformers warns on stderr that models need torch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
