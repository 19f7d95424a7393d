"""Published multimodal models, whole or their text part, in the published class and its names.

Of a text part, what reads other inputs, and what joins it to the text, is dropped as the model is
built: it takes no memory, and gets no gradient. All names stay those of the published class, so
that engines, adapters and exports need no other ones."""

from functools import cache
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from flotilla_common.models.multimodal_models import is_multimodal


def model_class(settings: Any, *, pictures: bool = False) -> Any:
    """Return what builds and loads a model of these settings; of a multimodal one its text part,
    or with `pictures` the whole."""
    if pictures:
        return AutoModelForImageTextToText
    if not is_multimodal(settings.to_dict()):
        return AutoModelForCausalLM
    return _text_part_of(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(settings)])


def find_tower(model: Any) -> nn.Module | None:
    """Return what reads pictures in a model or its body, together with what projects its features;
    None if it was not loaded."""
    return getattr(getattr(model, "base_model", model), "visual", None)


@cache
def _text_part_of(published: type) -> type:
    # Of the same name, by which transformers finds how to convert files.
    return type(published.__name__, (_TextPart, published), {"__module__": published.__module__})


class _TextPart:
    """Mixed into a published class."""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)  # pyright: ignore[reportCallIssue]
        model: Any = self
        body = model.base_model
        kept = (body, model.get_decoder(), model.get_output_embeddings())
        for owner, prefix in ((model, ""), (body, f"{model.base_model_prefix}.")):
            for name, child in list(owner.named_children()):
                if any(child is each for each in kept):
                    continue
                setattr(owner, name, None)
                # That files have weights for it is no news.
                model._keys_to_ignore_on_load_unexpected.add(rf"^{prefix}{name}\.")

    @classmethod
    def from_config(cls, settings: Any, *, trust_remote_code: bool = False, **options: Any) -> Any:
        """Build the model, like the method of transformers' automatic classes; a model's own code
        is never run."""
        del trust_remote_code
        published: Any = cls
        return published._from_config(settings, **options)
