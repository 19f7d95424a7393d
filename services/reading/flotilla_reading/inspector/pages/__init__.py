"""Pages of the inspector: their content, their addresses, and their templates, styles and scripts.
Start reading at `book.py`."""
