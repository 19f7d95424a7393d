"""The `flotilla` command. `app.py` declares the commands; each is implemented in a module of
its name."""
