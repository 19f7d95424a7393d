"""Vendors of the inspector: Jinja renders its pages, Starlette and uvicorn serve them, and
tokenizers gives tokens their texts."""
