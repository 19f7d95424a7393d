"""Order of the tasks: selection, curriculum, quarantine."""
