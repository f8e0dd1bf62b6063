"""What widely read articles promise of PyTorch's speed, measured on this machine: ``lightning-accel claims``.

Installed as ``lightning_accel.claims``. One claim a file, ``row_NN_….py``, whose docstring says what is promised
and why that may be so, with two names: ``CLAIM``, read from it, and ``measure()``, which yields what was found, a
:class:`~lightning_accel.claims.claim.Figure` a condition, and raises
:class:`~lightning_accel.claims.claim.NotHereError` where the machine lacks what it takes. Verdicts are not written in
the rows: :func:`~lightning_accel.claims.claim.verdict_of` draws them from the figures.
"""
