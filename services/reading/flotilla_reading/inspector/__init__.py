"""The inspector: pages that show any episode of a run, down to its tokens.

A separate process, `python -m flotilla_reading.inspector`, that reads journals and files of
runs. Start reading at `pages/book.py`; `queries/` reads, `pages/` defines each page's content, and
`adapters/` render and serve it."""
