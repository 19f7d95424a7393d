"""Data of runs, prepared and compared: `flotilla data`. `sources.py` fetches the files of a source,
and `row_files.py` reads their rows, which `conventions.py` makes tasks of. `preparation.py` decides
what becomes of each, by `quarantine.py`, `selection.py`, `lints.py` and `split.py`, which are pure.
`dataset_folder.py` writes and reads the result, and `comparison.py` tells two of them apart."""
