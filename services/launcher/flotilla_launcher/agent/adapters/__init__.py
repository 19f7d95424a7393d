"""The launcher and the cloud's metadata service, as an agent reaches them."""
