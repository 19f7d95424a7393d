"""The front door's table of a run spec, `[tinker]`."""
