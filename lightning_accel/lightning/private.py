"""Every name of Lightning's own that the library uses, one function each; see core/torch_private.py for the rules."""

from __future__ import annotations
