"""What breaks when a Lightning drops one of the private names that the library uses, in plain words: a test a name."""

from __future__ import annotations
