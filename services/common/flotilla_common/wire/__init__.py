"""Codecs between domain types and the contracts' messages that two services share.

Each pair of codecs exists once. Start at `trajectory.py`. `registry.py` is how every process calls
the launcher."""
