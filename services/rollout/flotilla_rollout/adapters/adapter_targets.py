"""The layers of a model for which an engine reserves adapters."""

from collections.abc import Iterator
from pathlib import Path

from flotilla_common.files.json_files import read_json_object
from flotilla_common.models.multimodal_models import is_multimodal, other_parts

# Learners train no adapters of these; one for the head would cost a product with the vocabulary for
# every token.
_NEVER = ("embed", "lm_head", "wte", "wpe")
# A router of experts, whose runner keeps it under two names.
_ROUTERS = ("gate", "router")


def list_adapter_targets(folder: Path) -> list[str]:
    """Return the last parts of the names of the linear layers of a model's text part except its
    head, from the headers of its files."""
    names = list(_list_matrices(folder))
    others = other_parts(names) if is_multimodal(read_json_object(folder / "config.json")) else ()
    found = {
        name.removesuffix(".weight").rpartition(".")[2]
        for name in names
        if name.endswith(".weight") and ".experts." not in name and name not in others
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
