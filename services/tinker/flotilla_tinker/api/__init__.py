"""The routes of the SDK's protocol, over any HTTP server. Each call is checked completely before
its order is accepted: a bad one is refused at once, with what to change, and never fails later.
Start at `routes.py`; `adapters/` has the server."""
