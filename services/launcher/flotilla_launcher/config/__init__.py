"""The launcher's tables of a run spec."""
