"""Packages that vLLM imports and never uses for text, as they are found by its processes where the
real ones are not installed. `text_only.py` beside this folder puts it on their path."""
