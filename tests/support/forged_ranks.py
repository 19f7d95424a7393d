"""Imports of training ranks, of the learner's other children, and of a learner with fake ranks, for
a forge."""

from importlib import import_module

for _name in (
    "services.common.telemetry.log",
    "services.learner.dumps.__main__",
    "services.learner.rank.worker",
    "services.learner.weights.adapters.weight_sender",
    "tests.faults.learner_process",
):
    import_module(_name)
