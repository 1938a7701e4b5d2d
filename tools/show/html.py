"""``--format html``: one page that holds everything it needs, its data included; it loads nothing from anywhere."""

import json
from pathlib import Path

from fxamp.listing import Document
from fxamp.tools.show.html_data import page_data

_PAGE = Path(__file__).parent / "page"

#: The page's scripts, in the order in which they build on one another.
SCRIPTS = ("model.js", "layout.js", "draw.js", "panel.js", "search.js", "table.js", "main.js")


def html_page(document: Document, title: str) -> str:
    """Return the page that shows ``document``; ``title`` names it, the file that was read for example.

    The lines of source files around the graph's are taken from the disk, as far as they are there.
    """
    page = (_PAGE / "page.html").read_text(encoding="utf-8")
    parts = {
        "STYLE": (_PAGE / "page.css").read_text(encoding="utf-8"),
        "SCRIPT": "\n".join((_PAGE / name).read_text(encoding="utf-8") for name in SCRIPTS),
        "DATA": _embedded(page_data(document, title)),
        "TITLE": _text(f"{title} - fxamp-show"),
    }
    for name, text in parts.items():
        page = page.replace(f"<!--{name}-->", text, 1)
    return page


def _embedded(data: object) -> str:
    """JSON that can stand in a script element: no ``<`` that could end it."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _text(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
