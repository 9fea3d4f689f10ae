"""A hook of the site: roles of docstrings, such as ``:meth:`close```, become code, with a link for a whole name."""

from __future__ import annotations

import re
from typing import Any

ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):<code>(~?)([\w.]+)</code>")


def on_page_content(html: str, **_: Any) -> str:
    """Called by MkDocs with each page, before links by name are resolved."""
    return ROLE.sub(_shown, html)


def _shown(found: re.Match[str]) -> str:
    short, name = found[1], found[2]
    code = f"<code>{name.rpartition('.')[2] if short else name.lstrip('.')}</code>"
    return f'<autoref optional identifier="{name}">{code}</autoref>' if name.startswith("disagg_kv.") else code
