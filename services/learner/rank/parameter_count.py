"""Number of a model's parameters, counted on the model itself, which is built without memory.

The launcher's doctor runs it in a process of its own."""

import torch
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.initialization import no_init_weights

from services.learner.rank.text_part import model_class


def count_parameters(folder: str, *, pictures: bool = False) -> int:
    """Return how many parameters ranks hold of the model that a config.json describes: of its text
    part, or with `pictures` of all.

    Raises transformers' errors for one that it does not know without code of the model's own."""
    settings = AutoConfig.from_pretrained(folder)
    build = AutoModelForImageTextToText if pictures else model_class(settings)
    with no_init_weights(), torch.device("meta"):
        model = build.from_config(settings, trust_remote_code=False)
    return sum(parameter.numel() for parameter in model.parameters())
