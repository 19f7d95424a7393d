"""The `flotilla` command. `app.py` declares the commands (`reading_commands.py` and `remote.py`
more of them); most are implemented in a module of their name, `status`, `logs`, `scale` and `stop`
in `run_commands.py`, `cancel` and `reap` in `submit.py`."""
