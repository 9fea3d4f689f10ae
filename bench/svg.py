"""The frame of a plot: its colours are those of the reader's scheme, light or dark."""

from __future__ import annotations

from collections.abc import Mapping

STYLE = """
text { fill: #1f2937; } .bg { fill: #ffffff; }
@media (prefers-color-scheme: dark) { text { fill: #e5e7eb; } .bg { fill: #0f172a; } }
""".strip()


def opened(title: str, width: int, height: int, size: int, colours: Mapping[str, tuple[str, str]]) -> list[str]:
    """The first lines of a file.

    Args:
        title: for readers who do not see it.
        width: in pixels.
        height: in pixels.
        size: of the letters, in pixels.
        colours: on a light ground and on a dark one, of each selector and property, such as ``".on fill"``.
    """
    light, dark = (
        " ".join("{} {{ {}: {}; }}".format(*key.rsplit(" ", 1), pair[scheme]) for key, pair in colours.items())
        for scheme in range(2)
    )
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="{size}" role="img">',
        f"<title>{title}</title>",
        f"<style>\n{STYLE}\n{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}\n</style>",
        f'<rect class="bg" width="{width}" height="{height}" rx="8"/>',
    ]
