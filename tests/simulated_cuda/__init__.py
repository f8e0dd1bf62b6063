"""A CUDA device that is simulated, for tests of what a program does with one: it needs g++ and torch built for CPUs.

    PYTHONPATH=tests python -m simulated_cuda train.py                                   # a script
    PYTHONPATH=tests python -m pytest -p simulated_cuda.plugin -m "gpu and not needs_kernels"  # tests

Tensors on it are ``torch.Tensor`` with a true ``is_cuda``: autocast, autograd's own thread for each device, and every
check of devices see the device, and the processor does the arithmetic, at once and in order. What a real device would
do later is kept in books: which kernel was launched on which stream, what waits for what, which copies are under way.
From them come the faults that a real device shows rarely or never, :data:`simulated_cuda.faults.FOUND`:

* a kernel reads or writes what one on another stream may not have finished writing or reading (``streams.py``);
* memory goes back to the allocator while a kernel on another stream may be using it (``memory.py``);
* pinned memory is written to, or read, while a copy of it is under way (``copies.py``).

Refused as on a real device, by an exception: tensors of two devices in one operation, whatever invalidates the capture
of a graph (``captures.py``), and what does not fit in a card, whose size is settable (``card.py``).

There are no kernels in it: tests that need a real one are marked ``needs_kernels``. Nor are there cuDNN, NVML, CuPy and
Inductor, and no time is a device's own but :func:`torch.cuda._sleep`'s.
"""
