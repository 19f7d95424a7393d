"""Data of runs, prepared and compared: `flotilla data`. `preparation.py` decides what becomes of
each task of a source, by `quarantine.py`, `selection.py`, `lints.py` and `split.py`, which are
pure. `dataset_folder.py` writes and reads the result, and `comparison.py` tells two of them
apart."""
