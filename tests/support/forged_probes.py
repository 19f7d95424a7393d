"""Imports of the processes that the doctor starts, for a forge: services and tokenizers, without
torch. Vendors that read the environment when they are imported see that of the forge."""

from importlib import import_module

from services.common.adapters.hidden_torch import hide_torch
from tests.support.process_forge import fork_children

_NAMES = (
    *("services.env_gateway.__main__", "services.learner.__main__", "services.rollout.__main__"),
    *("services.rollout.adapters.dialect_choice", "services.rollout.adapters.dialect_search"),
    *("services.rollout.adapters.chat_template_child", "services.rollout.api.codec"),
    "services.launcher.doctor.adapters.tokenizer_probe",
    "transformers.models.auto.tokenization_auto",
)

# First: some modules keep commands of this interpreter.
fork_children()
hide_torch()
for _name in _NAMES:
    import_module(_name)
