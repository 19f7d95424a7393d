"""The environments over HTTP: Fleet's instance wire, and one MCP endpoint per instance."""
