"""What the parts of a step are called, in records and on pages."""

from __future__ import annotations

DATA = "waiting for data"
TRANSFER = "transfer and preprocessing"
FORWARD = "forward"
BACKWARD = "backward"
COMMUNICATION = "communication"
OPTIMIZER = "optimizer"
LOGGING = "logging"
REST = "callbacks and the loop"
IDLE = "idle: the device waits for the host"

ORDER = (DATA, TRANSFER, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER, LOGGING, REST, IDLE)

COMPUTE = (FORWARD, BACKWARD, OPTIMIZER)
"""Of which idle time is told apart: there the device has work, and the host asks for it one operation at a time."""

RULE = (
    "A moment belongs to the innermost part that is under way: an optimizer's step that calls forward and backward has"
    " what is left without them. Communication is what ranks call torch.distributed for, wherever that is; of DDP's"
    " backward passes it is what was nothing else, by what DDP times of its first ten steps and each hundredth. On a"
    " GPU the parts are of the device's own timeline. While the host waits for the device, the device works, and the"
    " moment is the work's. While the device waits for the host, it is idle, by what the same part takes longer than"
    " in a step that the device begins when the host is ahead, and at the least: this is told of one GPU's forward,"
    " backward and optimizer. Otherwise the moment is in the part that keeps the device waiting."
)
