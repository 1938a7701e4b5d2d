"""fxamp-diff's page: both policies side by side on every op, self-contained, without a script, safe for any name."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from fxamp.graph_text import Listing
from fxamp.tools.diff.effect import effects
from fxamp.tools.diff.html import html_lines
from fxamp.tools.diff.result import Comparison, compare
from fxamp.tools.diff.side_by_side import Module, modules
from fxamp.tools.diff.sides import load_side

EVIL = "</style><script>alert(1)</script><img src=x>\"'&"
VOID = {"meta", "input", "br"}

MODEL = """
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)
        self.up = torch.nn.Linear(16, 16)

    def forward(self, x):
        return x + self.up(self.norm(x)).relu()

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.h = torch.nn.ModuleList(Block() for _ in range(3))
        self.head = torch.nn.Linear(16, 4)

    def forward(self, x):
        for block in self.h:
            x = block(x)
        return self.head(x)

torch.manual_seed(0)
model, inputs = Net(), (torch.randn(8, 16),)
"""

HEAD = 'extends = ["cpu-bfloat16.toml"]\n[[rule]]\nid = "head"\ncast = "fp32"\nmodules = ["head"]\n'


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder = tmp_path_factory.mktemp("diff")
    (folder / "model.py").write_text(MODEL)
    (folder / "head.toml").write_text(HEAD)
    old, new = (load_side(name, None, None) for name in ("cpu-bfloat16", str(folder / "head.toml")))
    both = compare(old, new)
    return replace(both, effects=tuple(effects(str(folder / "model.py"), both.old, both.new, trust=False)))


def sides(comparison: Comparison) -> tuple[Listing, Listing]:
    listings = comparison.effects[0].listings
    assert listings is not None
    return listings


class Tags(HTMLParser):
    """Asserts that every tag is closed in its order; collects tags and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {name for name, _ in attrs} & {"src", "href", "onload", "onclick"}
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def page(comparison: Comparison) -> str:
    return "\n".join(html_lines(comparison))


def test_the_page_is_one_well_formed_file_that_loads_and_runs_nothing(comparison: Comparison) -> None:
    text = page(comparison)
    tags = Tags(text)
    assert not tags.tags & {"script", "link", "img", "iframe"}
    assert "url(" not in text and "@import" not in text
    assert text == page(comparison)


def test_the_ops_that_differ_are_those_of_the_other_formats(comparison: Comparison) -> None:
    listed = modules(*sides(comparison))
    differ = {row.name for module in listed for row in module.rows if row.differs}
    assert differ == {op.entry.name for op in comparison.effects[0].ops} != set()
    assert page(comparison).count('class="row op differs"') == len(differ)


def test_equal_siblings_are_one_row_and_every_op_is_in_some_row(comparison: Comparison) -> None:
    listed = {module.path: module for module in modules(*sides(comparison))}
    assert {path: module.count for path, module in listed.items()} == {
        "h.*.norm": 3,
        "h.*.up": 3,
        "h.*": 3,
        "head": 1,
        "": 1,  # the result's cast, which is in no module of the model
    }
    ops = sum(module.count * len(module.rows) for module in listed.values())
    assert comparison.effects[0].sums is not None and ops == comparison.effects[0].sums[0].ops


def head(comparison: Comparison) -> Module:
    return next(module for module in modules(*sides(comparison)) if module.path == "head")


def test_a_row_says_dtype_rule_and_casts_of_both_sides(comparison: Comparison) -> None:
    (row,) = head(comparison).rows
    assert row.old is not None and row.new is not None
    assert (row.old.dtype, row.old.rule) == ("bf16", "matrix-products") and len(row.old.casts) == 3
    assert (row.new.dtype, row.new.rule, row.new.casts) == ("f32", "head", ())
    assert row.old.casts[0] == "f32 to bf16, 768 B"  # 8 x 16 elements of 4 + 2 bytes
    assert row.new.at.endswith("head.toml:2")


def test_an_op_that_only_one_side_has_is_shown_and_differs(comparison: Comparison) -> None:
    old, new = sides(comparison)
    fewer = replace(new, entries=tuple(entry for entry in new.entries if entry.name != "linear_3"))
    (row,) = next(module for module in modules(old, fewer) if module.path == "head").rows
    assert row.new is None and row.differs
    changed = replace(comparison, effects=(replace(comparison.effects[0], listings=(old, fewer)),))
    assert "not in this graph" in page(changed)


def test_modules_that_are_the_same_are_hidden_until_asked_for(comparison: Comparison) -> None:
    text = page(comparison)
    assert re.findall(r'<details class="(\w+)"', text) == ["same", "same", "same", "differs", "differs"]
    assert 'id="all"' in text and "body:not(:has(#all:checked)) .same { display: none; }" in text


def test_no_name_is_markup(comparison: Comparison) -> None:
    old, new = sides(comparison)
    listings = tuple(
        replace(
            listing, entries=tuple(replace(e, module=EVIL, reason=EVIL, module_class=EVIL) for e in listing.entries)
        )
        for listing in (old, new)
    )
    effect = replace(comparison.effects[0], file=EVIL, listings=(listings[0], listings[1]))
    tags = Tags(page(replace(comparison, effects=(effect,))))
    assert "script" not in tags.tags and "img" not in tags.tags
    assert EVIL in "".join(tags.words)


def test_a_graph_that_a_policy_refuses_says_why(comparison: Comparison) -> None:
    banned = replace(comparison.effects[0], rejections=("", "it is banned"), sums=None, listings=None)
    assert "the new policy refuses it: it is banned" in page(replace(comparison, effects=(banned,)))


def test_settings_and_rules_stand_beside_each_other() -> None:
    old, new = (load_side(name, None, None) for name in ("cuda-bfloat16", "cuda-float16"))
    words = Tags(page(compare(old, new))).words
    assert {"bfloat16", "float16", "cuda-bfloat16", "cuda-float16", "lower_precision_fp"} <= set(words)
