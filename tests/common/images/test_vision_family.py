import json
from pathlib import Path

import numpy as np
import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from flotilla_common.images.picture import Picture
from flotilla_common.images.placeholders import check_places, collapse_pictures, expand_pictures
from flotilla_common.images.vision_family import VisionFamily, load_vision_family
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.spec import VisionConfig

_CONFIGS = {
    "qwen2_5_vl": ({"patch_size": 14, "spatial_merge_size": 2}, {"min_pixels": 3136}),
    "qwen3_vl": (
        {"patch_size": 16, "spatial_merge_size": 2},
        {"patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 16777216}},
    ),
}


def _write_family(folder: Path, kind: str) -> VisionFamily:
    tower, processor = _CONFIGS[kind]
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "vision_config": tower}))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return load_vision_family(folder, VisionConfig())


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        ("qwen2_5_vl", {(1366, 768): 1222, (1024, 576): 777, (320, 240): 99}),
        ("qwen3_vl", {(1366, 768): 1032, (1024, 576): 576, (320, 240): 80}),
    ],
)
def test_a_picture_takes_as_many_tokens_as_the_family_publishes(
    tmp_path: Path, kind: str, tokens: dict[tuple[int, int], int]
) -> None:
    family = _write_family(tmp_path, kind)
    assert {size: family.count(family.grid(*size)) for size in tokens} == tokens


@pytest.mark.parametrize("kind", _CONFIGS)
def test_pictures_of_any_size_are_scaled_like_by_the_familys_own_processor(
    tmp_path: Path, kind: str
) -> None:
    family = _write_family(tmp_path, kind)
    sizes = np.random.default_rng(0).integers(1, 9000, (500, 2)).tolist()
    for width, height in [[1, 1], [8192, 64], [28, 28], [13, 2600], *sizes]:
        if max(width, height) > 200 * min(width, height):
            continue
        high, wide = smart_resize(
            height,
            width,
            factor=family.patch * family.merge,
            min_pixels=family.min_pixels,
            max_pixels=family.max_pixels,
        )
        assert family.grid(width, height) == (1, high // family.patch, wide // family.patch)


def test_a_picture_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="8192x8 pixels: one side may be at most 200 times"):
        _write_family(tmp_path, "qwen3_vl").grid(8192, 8)


def test_a_model_without_a_known_tower_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma3"}')
    with pytest.raises(ConfigError, match=r"'gemma3' are not shown pictures; those of qwen2_5_vl"):
        load_vision_family(tmp_path, VisionConfig())


def test_bounds_of_the_run_are_a_part_of_the_digest(tmp_path: Path) -> None:
    family = _write_family(tmp_path, "qwen3_vl")
    smaller = load_vision_family(tmp_path, VisionConfig(max_pixels=100_000))
    assert smaller.grid(1366, 768) < family.grid(1366, 768)
    assert smaller.processor_digest != family.processor_digest
    with pytest.raises(ConfigError, match="min_pixels is 65536 and max_pixels 5"):
        load_vision_family(tmp_path, VisionConfig(max_pixels=5))


def test_collapsed_sequences_expand_to_themselves(tmp_path: Path) -> None:
    family = _write_family(tmp_path, "qwen3_vl")
    pictures = [Picture("a" * 64, "image/png", w, h, b"") for w, h in [(320, 240), (64, 512)]]
    start, pad, end = family.vision_start, family.image_pad, family.vision_end
    given = [5, start, pad, end, 6, start, pad, end, 7]
    ids, shown = expand_pictures(given, pictures, family)
    places = [each.place for each in shown]
    assert len(ids) == 7 + sum(family.count(place.grid) for place in places)
    assert [place.offset for place in places] == [2, 2 + 80 + 3]
    check_places(ids, places, family)
    assert collapse_pictures(ids, places, family).tolist() == given
    with pytest.raises(ValueError, match="not those of its pictures"):
        check_places(ids, places[:1], family)
    with pytest.raises(ValueError, match="2 places for 1 pictures"):
        expand_pictures(given, pictures[:1], family)
