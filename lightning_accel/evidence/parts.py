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

ORDER = (DATA, TRANSFER, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER, LOGGING, REST)

RULE = (
    "A moment belongs to the innermost part that is under way: an optimizer's step that calls forward and backward has"
    " what is left without them. What ranks say to each other is in the part that waits for it; what of DDP's backward"
    " passes was nothing else is a part of its own, by what DDP times of its first ten steps and each hundredth. On a"
    " GPU the parts are of the device's own timeline, and time in which it has nothing to do is in the part that keeps"
    " it waiting."
)
