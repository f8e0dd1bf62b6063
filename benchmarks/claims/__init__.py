"""What widely read articles promise of PyTorch's speed, measured on this machine: ``lightning-accel claims``.

Installed as ``lightning_accel.claims``. One claim a file, ``row_NN_….py``, with two names: ``CLAIM``, what is promised,
and ``measure()``, which yields what was found, a :class:`~lightning_accel.claims.claim.Figure` a condition, and raises
:class:`~lightning_accel.claims.claim.NotHereError` where the machine lacks what it takes. Verdicts are not written in
the rows: :func:`~lightning_accel.claims.claim.verdict_of` draws them from the figures.
"""
