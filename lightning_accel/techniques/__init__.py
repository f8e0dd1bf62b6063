"""One file a technique, each against the protocol in :mod:`lightning_accel.techniques.base`."""
