"""The site: roles of docstrings are not shown as text."""

from __future__ import annotations

from mkdocs_roles import on_page_content
from tests.support.pages import ROOT


def test_roles_become_code_and_whole_names_become_links() -> None:
    text = (
        "see :meth:<code>~disagg_kv.transports.Transport.submit</code>, :class:<code>.dials.Dials</code> <code>x</code>"
    )
    link = '<autoref optional identifier="disagg_kv.transports.Transport.submit"><code>submit</code></autoref>'
    assert on_page_content(text, page=None) == f"see {link}, <code>dials.Dials</code> <code>x</code>"


def test_the_site_uses_the_hook() -> None:
    assert "\nhooks: [mkdocs_roles.py]\n" in (ROOT / "mkdocs.yml").read_text()
