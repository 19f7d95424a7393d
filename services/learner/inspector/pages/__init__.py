"""Pages of the inspector: what each shows, where each lies, and the templates, styles and scripts
that it is made of. Start reading at `book.py`."""
