"""fxamp-show's page: it holds everything, loads nothing, cannot be broken out of, and does what its controls say."""

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.programs.show_samples import gpt

from fxamp.graph_text import Document, KeptValue, Listing, Source
from fxamp.tools.show.html import SCRIPTS, html_page

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-background-networking --disable-component-update "
    "--disable-sync --no-first-run --disable-dev-shm-usage --virtual-time-budget=4000 --dump-dom"
)
EVIL = "</script><img src=x onerror=alert(1)><!--"


def data_of(page: str) -> Any:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    return json.loads(match[1])


def test_every_node_is_in_the_page_with_its_reason() -> None:
    listing = gpt()

    (graph,) = data_of(html_page(Document((listing,)), "gpt"))["graphs"]

    assert [node["name"] for node in graph["nodes"]] == [entry.name for _, entry in listing.walk()]
    for node, (_, entry) in zip(graph["nodes"], listing.walk(), strict=True):
        assert node.get("reason", "") == (entry.inserted or entry.reason)
        assert node.get("rule", {}).get("id", "") == (entry.rule.id if entry.rule else "")
        assert node.get("dtype", "") == entry.dtype and node.get("module", "") == entry.module
    assert graph["totals"]["casts"] == sum(entry.is_cast for _, entry in listing.walk())


def test_a_page_is_one_file_that_loads_nothing() -> None:
    page = html_page(Document((gpt(),)), "gpt")

    assert not re.search(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=", page)
    assert "url(" not in page and "@import" not in page and "fetch(" not in page
    assert set(re.findall(r"https?://[^\s\"'<]+", page)) <= {"http://www.w3.org/2000/svg"}  # a namespace's name
    assert "<!--STYLE-->" not in page and "<!--SCRIPT-->" not in page
    assert page == html_page(Document((gpt(),)), "gpt")


def test_every_script_is_used() -> None:
    folder = Path(__file__).parents[3] / "tools" / "show" / "page"
    assert {path.name for path in folder.glob("*.js")} == set(SCRIPTS)


def test_names_cannot_break_out_of_the_page() -> None:
    page = html_page(Document((evil(),)), EVIL)

    assert EVIL not in page and "<img" not in page
    (graph,) = data_of(page)["graphs"]
    assert {graph["nodes"][at]["module"] for at in range(len(graph["nodes"])) if graph["nodes"][at].get("module")} == {
        EVIL
    }
    assert data_of(page)["title"] == EVIL


def evil() -> Listing:
    listing = gpt()
    entries = (replace(entry, module=EVIL, reason=EVIL, module_class=EVIL) for entry in listing.entries)
    return replace(listing, entries=tuple(entries), bodies={}, policy=EVIL)


def test_sources_come_from_the_disk_or_else_from_the_graph(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("".join(f"line {number}\n" for number in range(1, 41)))
    listing = gpt()
    first = replace(listing.entries[-2], source=Source(str(file), 20, "forward", "quoted"))

    there = data_of(html_page(Document((replace(listing, entries=(first,)),)), "t"))["sources"][str(file)]
    file.unlink()
    gone = data_of(html_page(Document((replace(listing, entries=(first,)),)), "t"))["sources"][str(file)]

    assert there == {str(number): f"line {number}" for number in range(16, 25)}
    assert gone == {"20": "quoted"}


def after(tmp_path: Path, script: str, listing: Listing | None = None) -> Any:
    """What ``script``, which sets ``result``, finds when it runs in the page in a browser."""
    page = html_page(Document((listing or gpt(),)), "gpt")
    probe = (
        "<pre id=probe></pre><script>addEventListener('load', () => { let result; try {"
        f"{script}"
        "} catch (error) { result = String(error); }"
        "document.getElementById('probe').textContent = JSON.stringify(result); });</script>"
    )
    path = tmp_path / "page.html"
    path.write_text(page.replace("</body>", probe + "</body>"), encoding="utf-8")
    command = [str(BROWSER), *FLAGS.split(), f"--user-data-dir={tmp_path / 'profile'}", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    match = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match is not None, done.stderr[-2000:]
    return json.loads(html.unescape(match[1]))


in_browser = pytest.mark.skipif(BROWSER is None, reason="there is no chromium or google-chrome")


@in_browser
def test_a_module_opens_and_closes(tmp_path: Path) -> None:
    page = after(
        tmp_path,
        """
        setAll(false);
        const drawn = () => document.querySelectorAll('#world .op, #world .input').length;
        const closed = drawn();
        const box = [...state.model.boxes.values()].find((each) => each.module === 'h');
        document.querySelector('#world .box .title').dispatchEvent(new MouseEvent('click', {bubbles: true}));
        const opened = box.open;
        toggle(box);
        const again = box.open;
        setAll(true);
        result = {closed, opened, again, all: drawn(), ops: state.model.graph.nodes.filter(isDrawn).length};
        """,
    )
    assert page["opened"] is True and page["again"] is False
    assert page["closed"] < page["all"] == page["ops"]


@in_browser
def test_searching_opens_chooses_and_counts(tmp_path: Path) -> None:
    page = after(
        tmp_path,
        """
        setAll(false);
        const field = document.getElementById('search');
        field.value = 'softmax'; field.dispatchEvent(new Event('input'));
        const first = document.querySelector('#panel h2').textContent;
        field.value = 'matrix-products'; field.dispatchEvent(new Event('input'));
        field.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter'}));
        const second = document.getElementById('found').textContent;
        field.value = 'no such thing'; field.dispatchEvent(new Event('input'));
        result = {first, second, none: document.getElementById('found').textContent,
                  seen: Boolean(state.model.byId.get('softmax').box.open)};
        """,
    )
    assert page["first"] == "softmax" and page["seen"] is True
    assert page["second"].startswith("2 of ") and page["none"] == "0 found"


@in_browser
def test_the_panel_shows_the_reason_of_an_op_and_of_a_cast(tmp_path: Path) -> None:
    page = after(
        tmp_path,
        """
        setAll(true);
        const text = () => document.getElementById('panel').textContent;
        const part = state.parts.get(state.model.byId.get('linear'));
        part.dispatchEvent(new MouseEvent('click', {bubbles: true}));
        const op = text();
        part.dispatchEvent(new PointerEvent('pointermove', {bubbles: true, clientX: 5, clientY: 5}));
        const tip = document.getElementById('tip').textContent;
        const tag = document.querySelector('#world .tag');
        tag.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', bubbles: true}));
        const cast = text();
        document.querySelector('#panel a').click();
        result = {op, tip, cast, tag: tag.textContent, linked: document.querySelector('#panel h2').textContent};
        """,
    )
    assert "matrix-products: lower_precision_fp" in page["op"] and "policies/accelerators.toml" in page["op"]
    assert "Matrix products run on 16-bit units." in page["op"] and "rule matrix-products" in page["tip"]
    assert "cast, inserted by fxamp" in page["cast"] and "f32→f16" in page["tag"]
    assert page["linked"] in {entry.name for entry in gpt().entries}


@in_browser
def test_the_list_and_the_filters_show_what_they_say(tmp_path: Path) -> None:
    page = after(
        tmp_path,
        """
        document.getElementById('view').click();
        const rows = () => document.querySelectorAll('#list tbody tr').length;
        const all = rows();
        document.getElementById('casts').click();
        const casts = rows();
        document.getElementById('casts').click();
        result = {all, casts, back: rows(), hidden: document.getElementById('stage').hidden};
        """,
    )
    assert page["hidden"] is True and page["back"] == page["all"] > page["casts"] > 0


@in_browser
def test_evil_names_are_only_text_in_the_page(tmp_path: Path) -> None:
    page = after(
        tmp_path,
        "setAll(true); showBox([...state.model.boxes.values()][1]);"
        "result = {images: document.images.length, title: document.getElementById('title').textContent};",
        evil(),
    )
    assert page == {"images": 0, "title": "gpt"}


def test_it_opens_on_the_summary_that_the_text_prints() -> None:
    from fxamp.tools.show.select import select
    from fxamp.tools.show.summary import summary

    (graph,) = data_of(html_page(Document((gpt(),)), "gpt"))["graphs"]
    assert [tuple(line) for line in graph["summary"]] == summary(gpt(), 0, select(Document((gpt(),))))
    assert graph["summary"][0][0] == "ops" and any(label == "largest casts" for label, _ in graph["summary"])


def test_kept_bytes_are_summed_by_module_the_largest_first() -> None:
    values = [KeptValue(f"a{at}", "aten::add.Tensor", f"h.{at}.attn", "f32", (8,), "int8/8", 32, 9) for at in range(3)]
    values += [KeptValue("b", "aten::mm.default", "head", "f32", (8,), "f32", 32, 32)]
    (graph,) = data_of(html_page(Document((replace(gpt(), kept=tuple(values)),)), "gpt"))["graphs"]
    assert graph["kept_modules"] == [["head", 32, 32], ["h.*.attn", 96, 27]]
