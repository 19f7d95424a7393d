"""Plumbing of every service, in rooms by what it does. A process begins in
`process/service_main.py`, which reads its part of a run spec (`spec/`) and hands a
`process/runtime.py` to the service. `domain/` holds a trajectory's types."""
