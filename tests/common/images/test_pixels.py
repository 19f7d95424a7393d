import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import AutoImageProcessor

from flotilla_common.images.picture_files import PictureRefused, read_picture
from flotilla_common.images.pixels import PixelReader
from flotilla_common.images.vision_family import load_vision_family
from flotilla_common.spec.spec import VisionConfig

KINDS = ("qwen2_5_vl", "qwen3_vl")
SIZES = ((1, 1), (320, 240), (1366, 768), (8000, 41))


def _noise(width: int, height: int) -> bytes:
    values = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    written = BytesIO()
    Image.fromarray(values).save(written, "PNG")
    return written.getvalue()


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_are_those_of_the_published_processor(
    kind: str, vision_folder: Callable[[str], Path]
) -> None:
    folder = vision_folder(kind)
    family = load_vision_family(folder, VisionConfig())
    reader, published = (
        PixelReader(folder, family),
        AutoImageProcessor.from_pretrained(folder, backend="pil"),
    )
    for size in SIZES:
        data = _noise(*size)
        pixels = reader.read(data)
        expected = published(Image.open(BytesIO(data)), return_tensors="np")
        assert pixels.grid == family.grid(*size) == tuple(expected["image_grid_thw"][0])
        assert pixels.values.dtype == np.float32
        np.testing.assert_array_equal(pixels.values, expected["pixel_values"])
        side = family.patch**2
        assert pixels.values.shape == (np.prod(pixels.grid), 3 * family.temporal_patch * side)


def test_bounds_of_the_run_take_the_place_of_the_processors_own(
    tmp_path: Path, vision_folder: Callable[[str], Path]
) -> None:
    folder = vision_folder("qwen2_5_vl")
    family = load_vision_family(folder, VisionConfig(max_pixels=100_000))
    pixels = PixelReader(folder, family).read(_noise(1366, 768))
    assert pixels.grid == family.grid(1366, 768)
    assert np.prod(pixels.grid) * family.patch**2 <= 100_000


def test_settings_are_read_from_where_new_folders_keep_them(
    tmp_path: Path, vision_folder: Callable[[str], Path]
) -> None:
    old = vision_folder("qwen3_vl")
    (tmp_path / "config.json").write_text((old / "config.json").read_text())
    given = json.loads((old / "preprocessor_config.json").read_text())
    nested = {"image_processor": {**given, "image_mean": [0.25, 0.25, 0.25]}}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    family = load_vision_family(tmp_path, VisionConfig())
    assert family.processor_digest != load_vision_family(old, VisionConfig()).processor_digest
    data = _noise(64, 64)
    published = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    expected = published(Image.open(BytesIO(data)), return_tensors="np")["pixel_values"]
    np.testing.assert_array_equal(PixelReader(tmp_path, family).read(data).values, expected)


def test_threads_share_a_reader(vision_folder: Callable[[str], Path]) -> None:
    folder = vision_folder("qwen3_vl")
    reader = PixelReader(folder, load_vision_family(folder, VisionConfig()))
    files = [_noise(200 + each, 150) for each in range(16)]
    with ThreadPoolExecutor(4) as threads:
        for data, pixels in zip(files, threads.map(reader.read, files), strict=True):
            np.testing.assert_array_equal(pixels.values, reader.read(data).values)


def test_what_is_no_picture_is_refused(vision_folder: Callable[[str], Path]) -> None:
    folder = vision_folder("qwen3_vl")
    reader = PixelReader(folder, load_vision_family(folder, VisionConfig()))
    with pytest.raises(PictureRefused, match="cannot be read"):
        reader.read(read_picture(_noise(64, 64)).data[:90])
    with pytest.raises(ValueError, match="aspect ratio must be smaller than 200"):
        reader.read(_noise(2010, 10))
