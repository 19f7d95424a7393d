"""Pictures of series, drawn by matplotlib in a process of its own."""
