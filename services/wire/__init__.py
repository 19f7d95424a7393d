"""The contracts' messages that two services share, to the domain's types and back.

Each pair of codecs exists once. Start at `trajectory.py`."""
