"""Backends, which run replicas somewhere. Each implements the port `Backend` of `ports.py`."""
