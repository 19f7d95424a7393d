"""What people must hear: rules over steps, tasks and events, and each alarm raised once."""
