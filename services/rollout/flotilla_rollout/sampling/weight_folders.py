"""Checks of folders of weights against the engine's base, by the headers of their files.

An engine ignores matrices of layers that it does not know, and copies smaller ones into a corner of
its own: the answers would be the base's, with nothing to tell."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from flotilla_common.files.json_files import read_json_object
from flotilla_common.models.multimodal_models import name_in_files, other_parts
from flotilla_rollout.sampling.ports import UnfitWeights

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
_INDEX = "model.safetensors.index.json"
# How PEFT's names of tensors begin and end.
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
# It shares the embedding's weight, and may be left out of files.
_TIED_HEAD = "lm_head.weight"
_NAMED = 3

Shapes = Mapping[str, tuple[int, ...]]


def find_model_files(folder: Path) -> list[Path]:
    """Return the files of a Hugging Face model's weights. Raises UnfitWeights if there are none."""
    if (folder / _INDEX).is_file():
        try:
            files: Iterable[str] = read_json_object(folder / _INDEX)["weight_map"].values()
        except (ValueError, KeyError, AttributeError) as error:
            raise UnfitWeights(f"{folder / _INDEX} cannot be read: {error}") from error
        return [folder / Path(name).name for name in sorted(set(files))]
    found = [folder / "model.safetensors"]
    found = found if found[0].is_file() else sorted(folder.glob("*.safetensors"))
    if not found:
        raise UnfitWeights(f"{folder} holds no model: there are no safetensors files")
    return found


def read_shapes(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in the files. Raises UnfitWeights."""
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        try:
            with safe_open(path, framework="numpy") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise UnfitWeights(f"{path} cannot be read: {error}") from error
    return shapes


def check_adapter_folder(folder: Path, base: Shapes, max_rank: int) -> None:
    """Refuse a folder whose adapter the engine would not serve exactly. Raises UnfitWeights."""
    try:
        rank = read_json_object(folder / ADAPTER_CONFIG).get("r")
    except ValueError as error:
        raise UnfitWeights(f"{folder} holds no adapter: {error}") from error
    if type(rank) is not int or not 1 <= rank <= max_rank:
        raise UnfitWeights(
            f"the adapter in {folder} has rank {rank}, and the engine has room for 1 to"
            f" {max_rank} (rollout.sampling.max_rank)"
        )
    shapes = read_shapes([folder / ADAPTER_FILE])
    if not shapes:
        raise UnfitWeights(f"{folder / ADAPTER_FILE} holds no matrices")
    _raise_first(folder, _find_misfits(shapes, base, max_rank))


def _find_misfits(shapes: Shapes, base: Shapes, max_rank: int) -> Iterator[str]:
    for name, shape in shapes.items():
        if not name.startswith(_PREFIX) or not name.endswith((_A, _B)):
            yield f"{name} is no matrix of a linear layer ({_PREFIX}LAYER{_A})"
            continue
        layer = name.removeprefix(_PREFIX).removesuffix(_A).removesuffix(_B)
        weight = base.get(name_in_files(f"{layer}.weight", base))
        if weight is None or len(weight) != 2:
            yield f"the engine's model has no linear layer {layer}"
            continue
        first, second = (shapes.get(f"{_PREFIX}{layer}{end}", ()) for end in (_A, _B))
        rank = first[0] if first else 0
        if first != (rank, weight[1]) or second != (weight[0], rank) or rank > max_rank:
            yield f"{name} is {list(shape)}, which does not fit {layer}, {list(weight)}"


def check_model_folder(folder: Path, base: Shapes) -> None:
    """Refuse a folder that does not hold all weights of a model like the base. Raises
    UnfitWeights."""
    shapes = {
        name_in_files(name, base): shape
        for name, shape in read_shapes(find_model_files(folder)).items()
    }
    optional = {_TIED_HEAD, *other_parts(base)}
    missing = sorted(base.keys() - shapes.keys() - optional)
    unknown = sorted(shapes.keys() - base.keys() - optional)
    other = sorted(name for name in base.keys() & shapes.keys() if base[name] != shapes[name])
    _raise_first(
        folder,
        (
            f"{what} {', '.join(names[:_NAMED])}{' and others' if len(names) > _NAMED else ''}"
            for what, names in (
                ("the model lacks", missing),
                ("the engine's model has no", unknown),
                ("the engine's model has another shape of", other),
            )
            if names
        ),
    )


def _raise_first(folder: Path, problems: Iterator[str]) -> None:
    if problem := next(problems, ""):
        raise UnfitWeights(f"{folder}: {problem}")
