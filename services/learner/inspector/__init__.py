"""The inspector: pages that show any episode of a run, down to its tokens.

A process of its own, `python -m services.learner.inspector`, that reads journals and files of
runs. Start reading at `pages/book.py`; `queries/` reads, `pages/` holds the content of pages, and
`adapters/` render and serve it."""
