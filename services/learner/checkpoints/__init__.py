"""Checkpoints: writing, verification, upload, restoration and export. Start reading at
`checkpoint_folders.py`."""
