"""``--format html``: one self-contained page, including its data; it loads nothing."""

import html
import json
from pathlib import Path

from fxamp.graph_text import Document
from fxamp.tools.show.html_data import page_data

_PAGE = Path(__file__).parent / "page"

#: The page's scripts, each after those that it uses.
SCRIPTS = ("model.js", "layout.js", "draw.js", "panel.js", "search.js", "table.js", "main.js")


def html_page(document: Document, title: str) -> str:
    """Return the page that shows ``document``; ``title`` is its title, for example the file's name.

    Lines of source files around those of the graph are read from the disk if the files exist.
    """
    page = (_PAGE / "page.html").read_text(encoding="utf-8")
    parts = {
        "STYLE": "".join((_PAGE / name).read_text(encoding="utf-8") for name in ("colours.css", "page.css")),
        "SCRIPT": "\n".join((_PAGE / name).read_text(encoding="utf-8") for name in SCRIPTS),
        "DATA": _embedded(page_data(document, title)),
        "TITLE": html.escape(f"{title} - fxamp-show"),
    }
    for name, text in parts.items():
        page = page.replace(f"<!--{name}-->", text, 1)
    return page


def _embedded(data: object) -> str:
    """Return JSON for a script element, without any ``<`` that could end the element."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
