"""What a checkpoint keeps of a policy and its optimizer, and how it describes them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from flotilla_learner.rank import checkpoint
from flotilla_learner.rank.adapter_files import BaseRecord, save_adapter_config
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.optimizer import Optimizer
from flotilla_learner.rank.split_loading import MODEL, saved_tensors


@dataclass(frozen=True, slots=True)
class SavedState:
    """A policy whose weights are trained, or its adapters if it has a `base`."""

    policy: Policy
    optimizer: Optimizer
    base: BaseRecord | None

    @property
    def groups(self) -> dict[str, Mapping[str, Tensor]]:
        """Tensors by group."""
        return {checkpoint.OPTIMIZER: self.optimizer.state_tensors(), **self.weights}

    @property
    def weights(self) -> dict[str, Mapping[str, Tensor]]:
        """The group of the weights alone."""
        if self.base is not None:
            return {checkpoint.ADAPTERS: self.policy.saved_parameters()}
        return {MODEL: saved_tensors(self.policy.model)}

    @property
    def record(self) -> dict[str, object]:
        """Content of a checkpoint's record beside the step."""
        return {} if self.base is None else {"base": asdict(self.base)}

    def describe(self, directory: Path) -> list[str]:
        """Write a checkpoint's files other than tensors; return their names."""
        self.policy.config.save_pretrained(directory)
        if self.base is None:
            return [checkpoint.CONFIG_FILE]
        return [checkpoint.CONFIG_FILE, *save_adapter_config(self.policy, self.base, directory)]
