"""The `flotilla` command. `app.py` and the `*_commands.py` declare the commands and their options;
each is implemented in the module of its name (`status.py`, `stop.py`, ...) and run by
`command_runner.py`. The `*_text.py`, `*_view.py` and `*_json.py` format their output."""
