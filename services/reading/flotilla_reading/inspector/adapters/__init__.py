"""Vendors of the inspector: Jinja renders its pages, Starlette and uvicorn serve them, tokenizers
decodes tokens, and Inspect AI writes transcripts."""
