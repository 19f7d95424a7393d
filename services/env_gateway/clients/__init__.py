"""Clients by which outside programs play episodes of a gateway."""
