"""Episodes from open to close. `gateway.py` is the core; `episode_book.py` is pure."""
