"""The `flotilla` command. `app.py` declares the commands; each is carried out in a module of its
name."""
