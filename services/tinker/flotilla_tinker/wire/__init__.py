"""The bodies of the SDK's protocol, to this service's values and back; pure. An order's body is
read twice: when it arrives, for its faults, and when it is carried out, which may be after a
restart. Start at `loss_batches.py` and `samples.py`, whose bodies are protobuf; `model_orders.py`
reads those in JSON. As a whole it is the port `OrderWire`."""

from flotilla_tinker.wire.json_bodies import write_json as write_json
from flotilla_tinker.wire.loss_batches import read_forward_backward as read_forward_backward
from flotilla_tinker.wire.loss_batches import write_loss_result as write_loss_result
from flotilla_tinker.wire.model_orders import read_create_model as read_create_model
from flotilla_tinker.wire.model_orders import read_load as read_load
from flotilla_tinker.wire.model_orders import read_optim_step as read_optim_step
from flotilla_tinker.wire.model_orders import read_save as read_save
from flotilla_tinker.wire.samples import read_sample as read_sample
from flotilla_tinker.wire.samples import write_sample_result as write_sample_result
