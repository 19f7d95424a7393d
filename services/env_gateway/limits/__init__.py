"""Limits on the load of an environment, fair order among runs, and the gates at which calls
wait."""
