"""`flotilla data collect`: which of a source's tasks are solvable and not trivial, with evidence,
solutions and demonstrations. Start at `collection.py`; `fates.py` and `budget.py` decide and are
pure, `ledger.py` is what has been paid for, `recorded_episodes.py` reads conversations, and
`collected_folder.py` writes the result."""
