"""HTTP responses, bounded in bytes and time, for the adapters of every room."""
