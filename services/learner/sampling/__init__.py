"""Order of the tasks: selection, curriculum, quarantine. Start reading at `curriculum.py`."""
