"""Gateway to environments: episodes, their tool calls and their grades. Read `ports.py`, then
`episodes/gateway.py`."""
