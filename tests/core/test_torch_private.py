"""What breaks when a torch drops one of the private names that the library uses, in plain words: a test a name."""

from __future__ import annotations
