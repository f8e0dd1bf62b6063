"""Hooks of MkDocs: what GitHub's Markdown and docstrings say in ways that MkDocs' HTML has not.

Formulas become MathML, which browsers draw without a script from elsewhere. Of Sphinx's roles in docstrings the name is
left: ``:class:`~lightning_accel.Plan``` reads as ``Plan``.
"""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

# As pymdownx.arithmatex leaves them: \(…\) within a line, \[…\] on lines of their own.
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):<code>(~?)([\w.]+)</code>")


def on_page_content(content: str, **_: Any) -> str:
    """What MkDocs calls for each page, with its HTML."""
    return _ROLE.sub(_as_name, _FORMULA.sub(_as_mathml, content))


def _as_mathml(match: re.Match[str]) -> str:
    display = "block" if match[1] == "div" else "inline"
    return str(convert(html.unescape(match[2]).strip(), display=display))


def _as_name(match: re.Match[str]) -> str:
    return f"<code>{match[2].rpartition('.')[2] if match[1] else match[2]}</code>"
