"""The gateway's table of a run spec, and each backend's."""
