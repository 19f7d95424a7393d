"""Sizes of published models that read pictures, from their config.json alone, and the memory that
their pictures take."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.spec.spec import PolicyConfig, VisionConfig
from flotilla_launcher.doctor.memory_estimate import (
    GIB,
    EngineMemory,
    TrainerMemory,
    encoder_bytes,
    estimate_engine,
    estimate_trainer,
)
from flotilla_launcher.doctor.model_size import (
    ModelSize,
    UnknownModelSizeError,
    read_model_size,
)
from flotilla_launcher.doctor.vision_size import VisionSize
from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.config.lora import LoraConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.parameter_count import count_parameters
from flotilla_rollout.config.rollout import RolloutConfig

# config.json and preprocessor_config.json as published, without what says nothing of sizes.
QWEN3_VL_8B: Mapping[str, Any] = {
    "config": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": 151655,
        "video_token_id": 151656,
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "head_dim": 128,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "max_position_embeddings": 262144,
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "vocab_size": 151936,
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "deepstack_visual_indexes": [8, 16, 24],
            "depth": 27,
            "hidden_size": 1152,
            "in_channels": 3,
            "intermediate_size": 4304,
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": 4096,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    },
    "processor": {
        "size": {"longest_edge": 16777216, "shortest_edge": 65536},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
    },
}
QWEN2_5_VL_7B: Mapping[str, Any] = {
    "config": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "image_token_id": 151655,
        "video_token_id": 151656,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 128000,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "vocab_size": 152064,
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "in_chans": 3,
            "out_hidden_size": 3584,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "temporal_patch_size": 2,
        },
    },
    "processor": {
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
    },
}
# `safetensors.total` of the two models at the Hugging Face hub.
PUBLISHED = [(QWEN3_VL_8B, 8_767_123_696), (QWEN2_5_VL_7B, 8_292_166_656)]
IDS = ["Qwen3-VL-8B", "Qwen2.5-VL-7B"]
VISION = VisionConfig()


def folder_of(path: Path, published: Mapping[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(published["config"]))
    (path / "preprocessor_config.json").write_text(json.dumps(published["processor"]))
    return path


def size_of(path: Path, vision: VisionConfig = VISION) -> tuple[ModelSize, VisionSize]:
    model = read_model_size(folder_of(path, QWEN3_VL_8B), vision=vision)
    assert model.vision is not None
    return model, model.vision


@pytest.mark.parametrize(("published", "parameters"), PUBLISHED, ids=IDS)
def test_the_estimate_of_a_config_is_the_published_size(
    tmp_path: Path, published: Mapping[str, Any], parameters: int
) -> None:
    found = read_model_size(folder_of(tmp_path, published), vision=VISION)
    assert found.parameters == pytest.approx(parameters, rel=0.01)


@pytest.mark.parametrize(("published", "parameters"), PUBLISHED, ids=IDS)
def test_a_model_that_is_built_is_counted_exactly(
    tmp_path: Path, published: Mapping[str, Any], parameters: int
) -> None:
    folder = folder_of(tmp_path, published)
    whole = count_parameters(str(folder), pictures=True)
    assert whole == parameters
    # What is left of its text part is what reads pictures, to a thousandth.
    seeing = read_model_size(folder, vision=VISION).vision
    assert seeing is not None
    assert seeing.parameters == pytest.approx(whole - count_parameters(str(folder)), rel=1e-3)


def test_a_model_that_reads_no_pictures_is_refused(tmp_path: Path) -> None:
    text = {"config": QWEN3_VL_8B["config"]["text_config"], "processor": {}}
    with pytest.raises(UnknownModelSizeError, match="qwen3_vl_text"):
        read_model_size(folder_of(tmp_path, text), vision=VISION)


def test_the_largest_picture_follows_the_bounds_of_the_run(tmp_path: Path) -> None:
    assert size_of(tmp_path)[1].largest == 16_384
    bounded = VisionConfig(max_pixels=1366 * 768)
    assert size_of(tmp_path, bounded)[1].largest == 1366 * 768 // 32**2


def learner(lora: LoraConfig | None = None, **rank: object) -> dict[str, Any]:
    chosen = RankConfig.model_validate({"device": "cuda", "gradient_checkpointing": "full", **rank})
    return {
        "rank": chosen.model_dump(),
        "algorithm": AlgorithmConfig().model_dump(),
        "lora": None if lora is None else lora.model_dump(),
    }


def policy(vision: VisionConfig | None) -> PolicyConfig:
    return PolicyConfig(model="m", max_model_len=16_384, vision=vision)


def trainer(
    path: Path, vision: VisionConfig, lora: LoraConfig | None = None, **rank: object
) -> TrainerMemory:
    model, _ = size_of(path, vision)
    return estimate_trainer(model, policy(vision), learner(lora, pack_tokens=16_384, **rank))


def test_a_frozen_tower_has_neither_gradients_nor_moments(tmp_path: Path) -> None:
    _, seeing = size_of(tmp_path)
    frozen = trainer(tmp_path, VISION)
    trained = trainer(tmp_path, VisionConfig(tower="trained", projector="trained"))
    assert trained.parameters == frozen.parameters
    assert trained.gradients - frozen.gradients == 4 * seeing.parameters
    assert trained.moments - frozen.moments == 8 * seeing.parameters
    assert trained.activations > frozen.activations
    half = trainer(tmp_path, VisionConfig(projector="trained"))
    assert half.moments - frozen.moments == 8 * seeing.projector


def test_the_pixels_of_a_packs_pictures_are_counted(tmp_path: Path) -> None:
    """16,384 tokens of 4 patches of 1,536 numbers, on the device and once more before it."""
    many, one = (
        trainer(tmp_path, VisionConfig(max_images=images, max_pixels=1024 * 1024))
        for images in (32, 1)
    )
    pixels = 4 * 4 * 1536
    # One picture of 1,024 tokens, or as many as 16,384 tokens hold.
    assert many.host - one.host == (16_384 - 1024) * pixels
    # The tower's passing layer and the decoder's features come on top.
    assert many.activations - one.activations > (16_384 - 1024) * pixels


def test_text_alone_is_estimated_as_before(tmp_path: Path) -> None:
    model = read_model_size(folder_of(tmp_path, QWEN3_VL_8B))
    assert model.vision is None
    # The language part alone.
    assert model.parameters == pytest.approx(8_190_735_360, rel=1e-3)


def test_adapters_beside_pictures_fit_one_gpu_of_80_gb(tmp_path: Path) -> None:
    assert trainer(tmp_path, VISION, LoraConfig(rank=16)).device < 60 * GIB


def test_ranks_that_split_a_model_gather_the_whole_tower(tmp_path: Path) -> None:
    _, seeing = size_of(tmp_path)
    four, eight = (
        trainer(tmp_path, VISION, processes=count, shard=True).parameters for count in (4, 1024)
    )
    assert eight > 2 * seeing.parameters
    assert four > eight


def engine(model: ModelSize, vision: VisionConfig | None, **options: object) -> EngineMemory:
    section = {
        "engine": {"device": "cuda", **options},
        "max_input_length": 12_288,
        "max_generate_length": 4096,
    }
    rollout = RolloutConfig.model_validate(section).model_dump()
    return estimate_engine(model, policy(vision), rollout)


def test_an_engine_leaves_less_for_kv_by_its_encoder_cache(tmp_path: Path) -> None:
    bounded = VisionConfig(max_pixels=1024 * 1024)
    model, seeing = size_of(tmp_path, bounded)
    found = engine(model, bounded)
    assert found.weights == 2 * model.parameters
    assert found.pictures == encoder_bytes(model, policy(bounded), None)
    # Its cache alone: 8,192 tokens, each with the features of the last and of three more layers.
    assert found.pictures > 8192 * 4 * 4096 * 2
    text = engine(read_model_size(tmp_path), None)
    tower = 2 * seeing.parameters
    lost = text.kv_cache_bytes(80 * GIB) - found.kv_cache_bytes(80 * GIB)
    assert lost == pytest.approx(found.pictures + tower, rel=1e-2)
    assert engine(model, bounded, max_num_batched_tokens=32_768).pictures > found.pictures
