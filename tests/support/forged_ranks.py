"""Imports of training ranks, and of the learner's other children, for a forge."""

import services.common.log
import services.learner.dumps.__main__
import services.learner.rank.worker
import services.learner.weights.adapters.weight_sender  # noqa: F401
