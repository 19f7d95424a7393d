"""Pictures in tokens that a dialect has rendered: their places, and those of texts beside them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flotilla_common.domain.messages import MessageText, TokenText
from flotilla_common.images.picture import Picture, ShownPicture
from flotilla_common.images.placeholders import count_tokens, expand_pictures
from flotilla_common.images.vision_family import VisionFamily
from flotilla_rollout.tokenizer_port import TemplateError

# For each token that a dialect has rendered, and for the end, where it stands once its pictures
# have all their tokens.
Starts = NDArray[np.int64]


def place_pictures(
    ids: Sequence[int], pictures: Sequence[Picture], family: VisionFamily | None
) -> tuple[NDArray[np.int32], list[ShownPicture], Starts]:
    """Return rendered tokens as the model computes them, and the pictures in them.

    Raises TemplateError if there is not exactly one place for each picture."""
    if family is None:
        return np.array(ids, np.int32), [], np.arange(len(ids) + 1)
    try:
        expanded, shown = expand_pictures(ids, pictures, family)
    except ValueError as error:
        raise TemplateError(f"the pictures cannot be shown: {error}") from error
    counts = count_tokens(ids, [each.place.grid for each in shown], family)
    return expanded, shown, np.concatenate([[0], np.cumsum(counts)])


def move_text(text: MessageText, starts: Starts) -> MessageText:
    """Return a text in rendered tokens by where these stand with their pictures."""
    if isinstance(text, str):
        return text
    return TokenText(int(starts[text.start]), int(starts[text.end]), text.skip, text.drop)
