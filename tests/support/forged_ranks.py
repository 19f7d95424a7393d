"""Imports of training ranks, of the learner's other children, and of a learner with fake ranks, for
a forge."""

from importlib import import_module

for _name in (
    "flotilla_common.telemetry.log",
    "flotilla_learner.dumps.__main__",
    "flotilla_learner.rank.worker",
    "flotilla_learner.weights.adapters.weight_sender",
    "tests.faults.learner_process",
):
    import_module(_name)
