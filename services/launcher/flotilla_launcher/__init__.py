"""The launcher: turns one run spec into running services, keeps them running, and gives them
the addresses of their peers."""
