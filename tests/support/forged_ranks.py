"""Imports of training ranks, and of the learner's other children, for a forge."""

from importlib import import_module

for _name in (
    "services.common.log",
    "services.learner.dumps.__main__",
    "services.learner.rank.worker",
    "services.learner.weights.adapters.weight_sender",
):
    import_module(_name)
