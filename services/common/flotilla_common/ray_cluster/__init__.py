"""Ray between the machines of one service, which never connects to Ray in its own process.

Start reading at `ray_node.py`, a node as a child of this process. Further machines of a service
run `node_worker.py`."""
