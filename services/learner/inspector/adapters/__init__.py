"""Vendors of the inspector: Jinja renders its pages, Starlette and uvicorn serve them, tokenizers
gives tokens their texts, and Inspect AI writes transcripts and shows them."""
