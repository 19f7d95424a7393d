"""Stand-ins for packages that vLLM imports with models that read images, in its own process."""

import sys

from flotilla_common.models.text_only import find_stand_ins


def use_stand_ins() -> str | None:
    """Have this process find the stand-ins too, if it needs them; return their folder, or None.

    Not undone: only for a process in which vLLM runs."""
    folder = find_stand_ins()
    if folder is not None:
        sys.path.append(folder)
        if "transformers" in sys.modules:
            _renew_transformers()
    return folder


def _renew_transformers() -> None:
    """Have transformers forget that torchvision could not be found when it was imported."""
    import transformers
    from transformers.utils import import_utils

    for check in (
        import_utils.is_torchvision_available,
        import_utils.is_torchvision_v2_available,
        import_utils.is_torchvision_greater_or_equal,
    ):
        check.cache_clear()
    # Its packages have noted which of their names need it, and would give dummies of them.
    for module in list(sys.modules.values()):
        missing = getattr(module, "__dict__", {}).get("_object_missing_backend", {})
        for name in [name for name, needed in missing.items() if needed == ["torchvision"]]:
            del missing[name]
    from transformers import video_processing_utils

    for name in ("BaseVideoProcessor", "VideoProcessorMixin"):
        setattr(transformers, name, getattr(video_processing_utils, name))
