"""Training at a service that speaks Tinker's protocol, in place of our own ranks.

Start reading at `hosted_ranks.py`, which implements `learner.ports.Ranks`: `datums.py` turns a step
into orders, `step_book.py` remembers on disk what was ordered, and `adapters/` sends it."""
