"""Number of a model's parameters, counted on the model itself, which is built without memory.

The launcher's doctor runs it in a process of its own."""

import torch
from transformers import AutoConfig
from transformers.initialization import no_init_weights

from flotilla_learner.rank.text_part import model_class


def count_parameters(folder: str, *, pictures: bool = False) -> int:
    """Return how many parameters ranks load of the model that a config.json describes, with
    `pictures` of all of its parts.

    Raises transformers' errors for one that it does not know without code of the model's own."""
    settings = AutoConfig.from_pretrained(folder)
    with no_init_weights(), torch.device("meta"):
        model = model_class(settings, pictures=pictures).from_config(
            settings, trust_remote_code=False
        )
    return sum(parameter.numel() for parameter in model.parameters())
