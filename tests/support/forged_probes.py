"""Imports of the processes that the doctor starts, for a forge: services and tokenizers, without
torch. Vendors that read the environment when they are imported see that of the forge."""

from importlib import import_module

from flotilla_common.adapters.hidden_torch import hide_torch
from tests.support.process_forge import fork_children

_NAMES = (
    *("flotilla_env_gateway.__main__", "flotilla_learner.__main__", "flotilla_rollout.__main__"),
    *("flotilla_rollout.adapters.dialect_choice", "flotilla_rollout.adapters.dialect_search"),
    *("flotilla_rollout.adapters.chat_template_child", "flotilla_rollout.api.codec"),
    "flotilla_launcher.doctor.adapters.tokenizer_probe",
    "transformers.models.auto.tokenization_auto",
)

# First: some modules keep commands of this interpreter.
fork_children()
hide_torch()
for _name in _NAMES:
    import_module(_name)
