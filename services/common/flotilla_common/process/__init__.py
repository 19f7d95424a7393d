"""Processes of a run. `service_main.py` is the entry point of every service,
`service_lifecycle.py` drains and ends it, `run_membership.py` reports to the launcher and carries
out its commands. Children get `child_environment.py`; `line_channel.py` and `parent_channel.py` are
the two sides of a conversation with one, `run_child.py` is for those that answer once;
`spec_commands.py` reads the commands of a run spec."""
