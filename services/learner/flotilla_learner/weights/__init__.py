"""Publication of weights to rollouts: announced by `weight_broadcast.py`, over the transport that
`transfer_choice.py` chooses; served by `weight_server.py`, and sent into live engines by
`adapters/weight_sender.py`, each in its own process that `publication_child.py` starts.
`weight_deltas.py` computes the difference between successive ones. `rank/weight_slots.py` writes
them."""
