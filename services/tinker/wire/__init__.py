"""The bodies of the SDK's protocol, to this service's values and back; pure. An order's body is
read twice: when it arrives, for its faults, and when it is carried out, which may be after a
restart. Start at `loss_batches.py` and `samples.py`, whose bodies are protobuf; `model_orders.py`
reads those in JSON."""
