"""Folders of weights that an engine would not serve exactly are refused by the tensor."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from flotilla_rollout.sampling.ports import UnfitWeights
from flotilla_rollout.sampling.weight_folders import (
    check_adapter_folder,
    check_model_folder,
    find_model_files,
    read_shapes,
)

Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"
BASE = {
    "model.embed_tokens.weight": (40, 8),
    "model.norm.weight": (8,),
    f"{Q}.weight": (16, 8),
    f"{UP}.weight": (12, 8),
    "lm_head.weight": (40, 8),
}
MATRICES = {
    f"base_model.model.{Q}.lora_A.weight": (4, 8),
    f"base_model.model.{Q}.lora_B.weight": (16, 4),
}


def write(folder: Path, name: str, shapes: dict[str, tuple[int, ...]]) -> None:
    tensors = {key: np.zeros(shape, np.float32) for key, shape in shapes.items()}
    save_file(tensors, folder / name)


def write_adapter(folder: Path, shapes: dict[str, tuple[int, ...]], rank: object = 4) -> None:
    write(folder, "adapter_model.safetensors", shapes)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))


def test_an_adapter_of_the_bases_layers_passes(tmp_path: Path) -> None:
    write_adapter(tmp_path, MATRICES)
    check_adapter_folder(tmp_path, BASE, 4)


def test_a_multimodal_bases_layers_are_found_under_their_files_names(tmp_path: Path) -> None:
    base = {"language_model.model.layers.0.self_attn.q_proj.weight": (16, 8)}
    inner = "base_model.model.model.language_model.layers.0.self_attn.q_proj"
    write_adapter(tmp_path, {f"{inner}.lora_A.weight": (4, 8), f"{inner}.lora_B.weight": (16, 4)})
    check_adapter_folder(tmp_path, base, 4)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({f"base_model.model.{Q}.lora_A.weight": (4, 7)}, "which does not fit model.layers.0"),
        ({f"base_model.model.{Q}.lora_B.weight": (15, 4)}, "which does not fit model.layers.0"),
        ({f"base_model.model.{Q}.lora_B.weight": (16, 3)}, "which does not fit model.layers.0"),
        ({f"base_model.model.{UP}.lora_A.weight": (4, 8)}, "does not fit model.layers.0.mlp"),
        ({"base_model.model.model.layers.9.o_proj.lora_A.weight": (4, 8)}, "no linear layer"),
        ({"base_model.model.model.norm.lora_A.weight": (4, 8)}, "no linear layer model.norm"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": (4, 40)}, "is no matrix of"),
        ({f"{Q}.lora_A.weight": (4, 8)}, "is no matrix of"),
        (
            {
                f"base_model.model.{UP}.lora_A.weight": (5, 8),
                f"base_model.model.{UP}.lora_B.weight": (12, 5),
            },
            "does not fit",
        ),
    ],
)
def test_a_matrix_that_the_engine_would_ignore_or_cut_is_named(
    changed: dict[str, tuple[int, ...]], message: str, tmp_path: Path
) -> None:
    write_adapter(tmp_path, MATRICES | changed)
    with pytest.raises(UnfitWeights, match=message):
        check_adapter_folder(tmp_path, BASE, 4)


@pytest.mark.parametrize("rank", [5, 0, "4", None, True])
def test_a_rank_beyond_the_engines_room_is_refused(rank: object, tmp_path: Path) -> None:
    write_adapter(tmp_path, MATRICES, rank)
    with pytest.raises(UnfitWeights, match=rf"has rank {rank}, and the engine has room for 1 to 4"):
        check_adapter_folder(tmp_path, BASE, 4)


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnfitWeights, match="holds no adapter"):
        check_adapter_folder(tmp_path, BASE, 4)
    (tmp_path / "adapter_config.json").write_text('{"r": 4}')
    with pytest.raises(UnfitWeights, match=r"adapter_model\.safetensors cannot be read"):
        check_adapter_folder(tmp_path, BASE, 4)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"half")
    with pytest.raises(UnfitWeights, match=r"adapter_model\.safetensors cannot be read"):
        check_adapter_folder(tmp_path, BASE, 4)
    write_adapter(tmp_path, {})
    with pytest.raises(UnfitWeights, match="holds no matrices"):
        check_adapter_folder(tmp_path, BASE, 4)


def test_a_whole_model_passes_in_parts_and_without_its_tied_head(tmp_path: Path) -> None:
    names = list(BASE)
    write(tmp_path, "first.safetensors", {name: BASE[name] for name in names[:2]})
    write(tmp_path, "second.safetensors", {name: BASE[name] for name in names[2:-1]})
    # Not of the model, like another format's copy.
    write(tmp_path, "consolidated.safetensors", {"tok_embeddings": (1,)})
    where = dict.fromkeys(names[:2], "first.safetensors")
    where |= dict.fromkeys(names[2:-1], "second.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    check_model_folder(tmp_path, BASE)
    assert len(read_shapes(find_model_files(tmp_path))) == len(names) - 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({f"{Q}.weight": None}, f"the model lacks {Q}.weight"),
        ({f"{Q}.bias": (16,)}, f"the engine's model has no {Q}.bias"),
        ({f"{Q}.weight": (16, 9)}, f"the engine's model has another shape of {Q}.weight"),
        (dict.fromkeys(BASE), "the model lacks .* and others"),
    ],
)
def test_a_model_of_other_weights_is_refused(
    changed: dict[str, tuple[int, ...] | None], message: str, tmp_path: Path
) -> None:
    shapes = {name: shape for name, shape in (BASE | changed).items() if shape is not None}
    write(tmp_path, "model.safetensors", shapes)
    with pytest.raises(UnfitWeights, match=message):
        check_model_folder(tmp_path, BASE)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnfitWeights, match="no safetensors files"):
        check_model_folder(tmp_path, BASE)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": 5}')
    with pytest.raises(UnfitWeights, match="cannot be read"):
        check_model_folder(tmp_path, BASE)
