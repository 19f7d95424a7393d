"""The layers of a model for which an engine reserves adapters."""

from collections.abc import Iterator
from pathlib import Path

# Learners train no adapters of these; one for the head would cost a product with the vocabulary for
# every token.
_NEVER = ("embed", "lm_head", "wte", "wpe")
# A router of experts, whose runner keeps it under two names.
_ROUTERS = ("gate", "router")


def list_adapter_targets(folder: Path) -> list[str]:
    """Return the last parts of the names of a model's linear layers except its head, from the
    headers of its files."""
    found = {
        name.removesuffix(".weight").rpartition(".")[2]
        for name in _list_matrices(folder)
        if name.endswith(".weight") and ".experts." not in name
    }
    return sorted(
        name for name in found if name not in _ROUTERS and not any(each in name for each in _NEVER)
    )


def _list_matrices(folder: Path) -> Iterator[str]:
    # Not imported when a spec is only checked.
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            yield from (name for name in file.keys() if len(file.get_slice(name).get_shape()) == 2)  # noqa: SIM118
