"""Descriptions of adapters on disk: PEFT's configuration, and their base model."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla_common.models.multimodal_models import name_in_files
from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.model_loading import ModelError, find_own_files
from flotilla_learner.rank.weight_slots import fingerprint_weights

ADAPTER_CONFIG = "adapter_config.json"
# Name of the base's fingerprint in a publication of adapters alone.
BASE_MARK = "base_fingerprint"
# Keys of PEFT's configuration that define the effect of adapters.
_MEANING = ("r", "lora_alpha", "target_modules")


@dataclass(frozen=True, slots=True)
class BaseRecord:
    """Frozen model under some adapters."""

    model: str
    revision: str | None
    # Fingerprint of its publication, as hex.
    fingerprint: str

    @staticmethod
    def of_policy(policy: Policy, config: PolicyConfig) -> "BaseRecord":
        """Describe the base of a policy with adapters.

        Collective for a split policy: all ranks call it at the same time."""
        found = fingerprint_weights(policy.named_parameters(), policy.compute_dtype)
        return BaseRecord(config.model, config.revision, found.hex())

    def __str__(self) -> str:
        revision = f" at revision {self.revision}" if self.revision else ""
        return f"{self.model}{revision} (weights {self.fingerprint[:12]})"


def check_mergeable(policy: Policy, config: PolicyConfig) -> None:
    """Check that the files of the base name every layer with an adapter as the model does.

    An export merges the adapters into these files. Raises ModelError."""
    assert policy.adapters is not None
    files = find_own_files(config)
    weights = {name: f"{name}.weight" for name in policy.adapters.layers}
    other = [name for name, weight in weights.items() if name_in_files(weight, files) not in files]
    if other:
        raise ModelError(
            f"learner.lora: the files of {config.model} have another name for {other[0]}.weight, so"
            " no export could merge its adapter into them: save the model once with"
            " transformers' save_pretrained, or leave such layers out of target_modules"
        )


def describe_other_base(saved: BaseRecord | None, given: BaseRecord) -> str:
    """Explain why adapters of `saved`, or a whole model, do not fit the base `given`."""
    if saved is None:
        return (
            "it holds a whole model and no adapters: the run started without learner.lora; leave"
            " that out, or start a new run from an export of this one"
        )
    return (
        f"its adapters belong to {saved}, but policy.model is {given}: restore policy.model and"
        " policy.dtype, or start a new run"
    )


def save_adapter_config(policy: Policy, base: BaseRecord, folder: Path) -> Sequence[str]:
    """Write PEFT's configuration of the policy's adapters; return the names of its files."""
    config = _peft_config(policy)
    config.base_model_name_or_path, config.revision = base.model, base.revision
    config.inference_mode = True
    config.save_pretrained(str(folder))
    path = folder / ADAPTER_CONFIG
    written = json.loads(path.read_text())
    # PEFT keeps a set, whose order differs between processes.
    written["target_modules"] = sorted(written["target_modules"])
    path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
    return (ADAPTER_CONFIG,)


def check_adapter_config(policy: Policy, folder: Path) -> None:
    """Raise ValueError, or OSError, for adapters of another configuration than the policy's."""
    own, written = _peft_config(policy), json.loads((folder / ADAPTER_CONFIG).read_text())
    for key in _MEANING:
        given = getattr(own, key)
        if written[key] != (sorted(given) if isinstance(given, set) else given):
            raise ValueError(_describe_other_setting(key, written[key], given))


def _describe_other_setting(key: str, saved: object, given: object) -> str:
    names = {"r": "rank", "lora_alpha": "alpha"}
    what = f"learner.lora.{names.get(key, key)}"
    if key not in names:
        return f"they have other layers than {what} names: set it back"
    return f"they started with {what} = {saved}, but it is {given}: set it back"


def _peft_config(policy: Policy) -> Any:
    assert policy.adapters is not None
    return policy.adapters.peft_config()
