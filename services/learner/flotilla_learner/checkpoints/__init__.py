"""Checkpoints: writing, verification, upload, restoration and export. Start reading at
`checkpoint_folders.py`. `run/train_loop.py` decides when one is made, and the transaction
in `journal/checkpoint_tables.py` which ones are kept."""
