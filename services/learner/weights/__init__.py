"""Publication of weights to rollouts: announced by `weight_broadcast.py`, served by
`weight_server.py`; `rank/weight_slots.py` writes them."""
