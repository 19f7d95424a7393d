"""Publication of weights to rollouts: announced by `weight_broadcast.py`; served by
`weight_server.py`, and sent into live engines by `adapters/weight_sender.py`, each a process of its
own that `publication_child.py` starts. `weight_deltas.py` finds what has changed from one to the
next. `rank/weight_slots.py` writes them."""
