"""Batches of sequences that show pictures."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flotilla_common.images.picture import Picture, PlacedPicture
from flotilla_common.images.placeholders import expand_pictures
from flotilla_common.images.vision_family import VisionFamily, load_vision_family
from flotilla_common.spec.spec import VisionConfig
from flotilla_learner.types import TrainBatch, TrainSequence
from tests.support.vision_models import draw_picture

PICTURES = (draw_picture(1, 96, 64), draw_picture(2, 64, 160), draw_picture(3, 70, 70))
# Ids below those that stand for pictures.
TEXT = 250

Part = NDArray[np.int32] | Picture


def family_of(folder: Path) -> VisionFamily:
    return load_vision_family(folder, VisionConfig())


def show(
    family: VisionFamily, parts: Sequence[Part], start: int = 0
) -> tuple[NDArray[np.int32], tuple[PlacedPicture, ...]]:
    """Return the tokens of text and pictures in turn, and the pictures' places from `start` on."""
    mark = np.array([family.vision_start, family.image_pad, family.vision_end], np.int32)
    whole = [mark if isinstance(part, Picture) else part for part in parts]
    pictures = [part for part in parts if isinstance(part, Picture)]
    ids, shown = expand_pictures(np.concatenate(whole), pictures, family)
    return ids, tuple(replace(s.place, offset=s.place.offset + start) for s in shown)


def picture_batch(
    family: VisionFamily,
    *,
    step: int = 1,
    groups: int = 2,
    size: int = 3,
    blind: Sequence[int] = (),
) -> TrainBatch:
    """Groups of attempts that share a prompt with a picture, and then see one of their own; the
    groups whose places are in `blind` see none."""
    rng = np.random.default_rng(step)
    sequences: list[TrainSequence] = []
    for group in range(groups):
        first: list[Part] = [_text(rng, 5), PICTURES[0], _text(rng, 9)]
        if group in blind:
            first = [_text(rng, 12)]
        for attempt in range(size):
            seen: list[Part] = [_text(rng, 2), PICTURES[1 + attempt % 2], _text(rng, 3)]
            if group in blind:
                seen = [_text(rng, 4)]
            sequences.append(_sequence(family, rng, group, attempt, first, seen))
    return TrainBatch(step, tuple(sequences), pictures={p.sha256: p.data for p in PICTURES})


def _sequence(
    family: VisionFamily,
    rng: np.random.Generator,
    group: int,
    attempt: int,
    first: list[Part],
    between: list[Part],
) -> TrainSequence:
    """Return a sequence of two turns: a prompt, a turn, what the policy sees then, another turn,
    and a picture that nothing is trained behind."""
    ids, pictures = show(family, first)
    mask = np.zeros(len(ids), np.bool_)
    for length, seen in ((3, between), (4, [PICTURES[0]] if len(first) > 1 else [])):
        ids = np.concatenate([ids, _text(rng, length)])
        mask = np.append(mask, [True] * length)
        if seen:
            more, shown = show(family, seen, len(ids))
            pictures += shown
            ids, mask = np.concatenate([ids, more]), np.append(mask, np.zeros(len(more), np.bool_))
    return TrainSequence(
        group_id=f"g{group}",
        attempt_index=attempt,
        reward=float((attempt + group) % 3 == 0),
        token_ids=ids,
        policy_mask=mask,
        behaviour_logprobs=np.where(mask, -np.log(TEXT), 0).astype(np.float32),
        temperature=0.8,
        staleness=0,
        pictures=pictures,
    )


def _text(rng: np.random.Generator, length: int) -> NDArray[np.int32]:
    return rng.integers(0, TEXT, length).astype(np.int32)
