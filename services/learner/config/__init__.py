"""The learner's tables of a run spec."""
