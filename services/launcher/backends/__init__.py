"""Where replicas run. Each backend implements the port `Backend` of `launcher/ports.py`."""
