"""Ray between the machines of one service, which never connects to it in its own process.

Start reading at `ray_node.py`, a node as a child of this process. A further machine of a service
runs `node_worker.py`."""
