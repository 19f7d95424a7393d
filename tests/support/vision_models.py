"""Tiny random models that see pictures, and batches that show some."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from services.common.images.made_pictures import noise_picture, plain_picture
from services.common.images.picture import Picture, PlacedPicture
from services.common.images.placeholders import expand_pictures
from services.common.images.vision_family import VisionFamily, load_vision_family
from services.common.spec.spec import VisionConfig
from services.learner.types import TrainBatch, TrainSequence
from tests.support.multimodal_models import make_multimodal

KINDS = ("qwen2_5_vl", "qwen3_vl")
# Of patches of 4 pixels, 2 x 2 of which make a token.
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 64 * 64},
}
PICTURES = (
    noise_picture(),
    plain_picture(24, 40, 0x3366CC),
    plain_picture(31, 17, 0xCC3300),
)


def write_vision_model(folder: Path, kind: str) -> Path:
    """Write a random model with its processor's settings and a tokenizer."""
    make_multimodal(folder, kind)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


def family_of(folder: Path) -> VisionFamily:
    return load_vision_family(folder, VisionConfig())


def show(
    family: VisionFamily, parts: Sequence[NDArray[np.int32] | Picture]
) -> tuple[NDArray[np.int32], tuple[PlacedPicture, ...]]:
    """Return the tokens of text and pictures in turn, and the pictures' places."""
    mark = [family.vision_start, family.image_pad, family.vision_end]
    whole = [np.array(mark, np.int32) if isinstance(part, Picture) else part for part in parts]
    pictures = [part for part in parts if isinstance(part, Picture)]
    ids, shown = expand_pictures(np.concatenate(whole), pictures, family)
    return ids, tuple(each.place for each in shown)


def text(rng: np.random.Generator, length: int) -> NDArray[np.int32]:
    """Return ids below those that stand for pictures."""
    return rng.integers(0, 270, length).astype(np.int32)


def picture_batch(
    family: VisionFamily, *, step: int = 1, groups: int = 2, size: int = 3, blind: bool = False
) -> TrainBatch:
    """Groups of attempts that share a prompt with a picture, and then see one of their own; with
    `blind`, all but the first group see none."""
    rng = np.random.default_rng(step)
    sequences: list[TrainSequence] = []
    for group in range(groups):
        first: list[NDArray[np.int32] | Picture] = [text(rng, 5), PICTURES[0], text(rng, 4)]
        if blind and group:
            first = [text(rng, 12)]
        for attempt in range(size):
            seen: list[NDArray[np.int32] | Picture] = [PICTURES[1 + attempt % 2], text(rng, 3)]
            ends = [[3], [4]] if blind and group else [[3], [*seen, 4]]
            sequences.append(_sequence(family, rng, (group, attempt), first, ends))
    return TrainBatch(step, tuple(sequences), pictures={p.sha256: p.data for p in PICTURES})


def _sequence(
    family: VisionFamily,
    rng: np.random.Generator,
    place: tuple[int, int],
    first: list[NDArray[np.int32] | Picture],
    turns: list[list[NDArray[np.int32] | Picture | int]],
) -> TrainSequence:
    """Return a sequence whose turns' numbers are lengths of what the policy wrote."""
    ids, pictures = show(family, first)
    mask = np.zeros(len(ids), np.bool_)
    for turn in turns:
        given = [part for part in turn if not isinstance(part, int)]
        if given:
            more, shown = show(family, given)
            pictures += tuple(replace(p, offset=p.offset + len(ids)) for p in shown)
            ids, mask = np.concatenate([ids, more]), np.append(mask, np.zeros(len(more), np.bool_))
        (length,) = (part for part in turn if isinstance(part, int))
        ids, mask = np.concatenate([ids, text(rng, length)]), np.append(mask, [True] * length)
    return TrainSequence(
        group_id=f"g{place[0]}",
        attempt_index=place[1],
        reward=float((place[1] + place[0]) % 3 == 0),
        token_ids=ids,
        policy_mask=mask,
        behaviour_logprobs=np.where(mask, -np.log(290), 0).astype(np.float32),
        temperature=0.8,
        staleness=0,
        pictures=pictures,
    )
