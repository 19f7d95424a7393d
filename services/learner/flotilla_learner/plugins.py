"""What a module of `learner.algorithm.plugins` imports: estimators and losses of one's own.

These names stay when others of this package move; docs/algorithms.md has an example. Those that
need torch are imported when they are first used."""

from typing import TYPE_CHECKING, Any

from flotilla_learner.algo.advantages import ADVANTAGES, BatchRewards, within_groups
from flotilla_learner.algo.gae import TokenValues
from flotilla_learner.algo.held_tokens import UpdateTokens
from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.types import TurnTokens

if TYPE_CHECKING:
    from flotilla_learner.algo.losses import LOSSES, LossInput, TokenLoss

__all__ = [
    "ADVANTAGES",
    "LOSSES",
    "AlgorithmConfig",
    "BatchRewards",
    "LossInput",
    "TokenLoss",
    "TokenValues",
    "TurnTokens",
    "UpdateTokens",
    "within_groups",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from flotilla_learner.algo import losses

    return getattr(losses, name)
