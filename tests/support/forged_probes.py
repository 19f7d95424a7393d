"""Imports of the processes that the doctor starts, for a forge: services and tokenizers, without
torch. Vendors that read the environment when they are imported see that of the forge."""

from importlib import import_module

from services.common.adapters.hidden_torch import hide_torch

_NAMES = (
    *("services.env_gateway.__main__", "services.learner.__main__", "services.rollout.__main__"),
    *("services.rollout.adapters.dialect_choice", "services.rollout.adapters.model_files"),
    *("services.rollout.api.codec", "services.launcher.doctor.adapters.tokenizer_probe"),
    "transformers.models.auto.tokenization_auto",
)

hide_torch()
for _name in _NAMES:
    import_module(_name)
