"""Tiny random vision models as their families publish them, with tokenizer, chat template and image
processor; pictures for them; and what transformers computes."""

import json
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from flotilla_common.images.picture import Picture, ShownPicture
from flotilla_common.images.picture_files import read_picture
from flotilla_common.images.pixels import PixelReader
from flotilla_common.images.placeholders import expand_pictures
from flotilla_common.images.vision_family import VisionFamily
from flotilla_environments.tiny_policy.tokenizer import save_tokenizer, train_tokenizer

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' ~ message.role ~ '\\n' }}
{%- for part in ([message.content] if message.content is string else message.content) %}
{%- if part is string %}{{- part }}
{%- elif part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}{{- part.text }}
{%- endif %}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
_CORPUS = ("find book hotel Rome system user assistant Tools click screen",)
_TEXT: Mapping[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "pad_token_id": None,
}
_ROPE: Mapping[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10_000.0,
    "mrope_section": [8, 4, 4],
}
_TOWER: Mapping[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    # Of so small a tower, for pictures to make a difference.
    "initializer_range": 0.2,
}
_MEANS: Mapping[str, Any] = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
# By `model_type`: settings of the text, the tower and the image processor.
VISION_KINDS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]] = {
    "qwen2_5_vl": (
        {"rope_parameters": _ROPE},
        {"patch_size": 14, "fullatt_block_indexes": [1], "window_size": 56},
        {
            **_MEANS,
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2_5_VLProcessor",
            "patch_size": 14,
            "min_pixels": 56 * 56,
            "max_pixels": 28 * 28 * 16384,
        },
    ),
    "qwen3_vl": (
        {"head_dim": 32, "rope_parameters": {**_ROPE, "mrope_interleaved": True}},
        {"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        {
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "processor_class": "Qwen3VLProcessor",
            "patch_size": 16,
            # Published ones have 256 * 256 at least.
            "size": {"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 16384},
        },
    ),
}


def make_vision_model(folder: Path, kind: str) -> None:
    """Write a model, its tokenizer and the settings of its processor to `folder`; float32."""
    text, tower, processor = VISION_KINDS[kind]
    tokenizer = train_tokenizer(_CORPUS * 3, 290)
    tokenizer.add_special_tokens({"additional_special_tokens": list(VISION_TOKENS)})
    tokenizer.chat_template = CHAT_TEMPLATE
    save_tokenizer(tokenizer, folder)
    ids = tokenizer.get_vocab()
    start, end, image, video = (ids[token] for token in VISION_TOKENS)
    make: Any = CONFIG_MAPPING[kind]
    config = make(
        text_config={**_TEXT, **text, "eos_token_id": ids["<|im_end|>"]},
        vision_config={**_TOWER, **tower},
        tie_word_embeddings=False,
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    settings = {**processor, "temporal_patch_size": 2, "merge_size": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    if kind == "qwen3_vl":
        settings["video_processor_type"] = "Qwen3VLVideoProcessor"
        (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))


def load_vision_model(folder: Path) -> PreTrainedModel:
    """Return the model that `make_vision_model` wrote, for evaluation."""
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def draw_picture(seed: int, width: int = 84, height: int = 56) -> Picture:
    """Return a picture of random blocks."""
    blocks = np.random.default_rng(seed).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    written = BytesIO()
    Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST).save(written, "PNG")
    return read_picture(written.getvalue())


def show_pictures(
    family: VisionFamily, pictures: Sequence[Picture], text: Sequence[int] = range(3, 20)
) -> tuple[NDArray[np.int32], list[ShownPicture]]:
    """Return a prompt with text before, between and after pictures, and their places."""
    ids = list(text)
    for picture in range(len(pictures)):
        ids += [family.vision_start, family.image_pad, family.vision_end, 20 + picture, *text]
    return expand_pictures(ids, pictures, family)


def vision_inputs(
    token_ids: NDArray[np.int32],
    shown: Sequence[ShownPicture],
    family: VisionFamily,
    reader: PixelReader,
) -> dict[str, torch.Tensor]:
    """Return the arguments of transformers' model for one sequence."""
    ids = torch.tensor(token_ids.tolist())[None]
    if not shown:
        return {"input_ids": ids}
    pixels = [reader.read(each.picture.data) for each in shown]
    return {
        "input_ids": ids,
        "pixel_values": torch.from_numpy(np.concatenate([each.values for each in pixels])),
        "image_grid_thw": torch.tensor([each.grid for each in pixels]),
        "mm_token_type_ids": (ids == family.image_pad).int(),
    }


def vision_logprobs(
    model: PreTrainedModel,
    inputs: Mapping[str, torch.Tensor],
    *,
    banned: Sequence[int] = (),
    temperature: float = 1.0,
) -> NDArray[np.float32]:
    """Return logprobs of tokens 1..n-1 given those before them, by transformers, normalised without
    the `banned` ids."""
    with torch.no_grad():
        logits = model(**inputs).logits[0, :-1].float() / temperature
    logits[:, list(banned)] = -torch.inf
    return torch.log_softmax(logits, -1).gather(-1, inputs["input_ids"][0, 1:, None])[:, 0].numpy()
