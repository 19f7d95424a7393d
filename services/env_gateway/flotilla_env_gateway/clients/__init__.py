"""Clients for outside programs that play episodes at a gateway."""
