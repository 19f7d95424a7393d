"""Tinker's own client and cookbook, unmodified, on our server: `make test-tinker`.

`stage.py` makes what a user has (a model, data sets), `conftest.py` starts the server, `recipes.py`
runs the cookbook, and `support_page.py` writes what happened into docs/tinker.md."""
