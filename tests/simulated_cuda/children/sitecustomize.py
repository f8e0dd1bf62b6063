"""Read by every Python process that one on a simulated device starts: the device is theirs as well."""

from simulated_cuda import device

device.install()
