"""Imports of the inspector of runs, and of the program that makes its transcripts, for a forge."""

from importlib import import_module

from tests.support.process_forge import fork_children

_NAMES = (
    "flotilla_reading.inspector.__main__",
    "flotilla_reading.inspector.transcript_command",
    "flotilla_reading.inspector.adapters.inspect_log",
)

fork_children()
for _name in _NAMES:
    import_module(_name)
