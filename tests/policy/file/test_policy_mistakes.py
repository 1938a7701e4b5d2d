"""Broken policy files: each has the message that it must give, at the line of the mistake."""

from pathlib import Path

import pytest
from broken_policies import BROKEN, HEAD, RULE, Broken, parsed

from fxamp.errors import PolicyError
from fxamp.policy import Policy
from fxamp.policy.file.lines import index_lines


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_refused_at_its_line(broken: Broken, tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text(broken.text)
    with pytest.raises(PolicyError, match=rf"broken\.toml:{broken.line}: .*{broken.message}") as caught:
        Policy.load(path)
    assert all(line.startswith(f"{path}:") for line in str(caught.value).splitlines()), "one mistake, one line"
    with pytest.raises(PolicyError, match=rf"(?m)^a name:{broken.line}: "):
        Policy.loads(broken.text, "a name")


def test_every_mistake_of_the_corpus_is_reported_when_they_come_together(tmp_path: Path) -> None:
    texts = [broken.text for broken in BROKEN.values()]
    rules = [text.removeprefix(HEAD) for text in texts if text.startswith(HEAD + "[[rule]]\nid") and parsed(text)]
    path = tmp_path / "broken.toml"
    path.write_text(HEAD + "".join(text.replace('"a"', f'"a{at}"') for at, text in enumerate(rules)))
    with pytest.raises(PolicyError) as caught:
        Policy.load(path)
    lines = [int(mistake.partition("broken.toml:")[2].partition(":")[0]) for mistake in str(caught.value).splitlines()]
    assert len(lines) >= len(rules) > 60 and lines == sorted(lines)


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "table.toml").write_text('outptus = "keep"\n')
    path = tmp_path / "broken.toml"
    path.write_text('extends = ["table.toml"]\noutputs = 3\n' + RULE.replace("fp32", "fp31").replace("exp", "e xp"))
    with pytest.raises(PolicyError) as caught:
        Policy.load(path)
    lines = [line.removeprefix(f"{tmp_path}/")[:15] for line in str(caught.value).splitlines()]
    assert lines == ["table.toml:1: u", "broken.toml:2: ", "broken.toml:5: ", "broken.toml:6: "]


def test_a_file_that_is_read_again_has_the_same_mistakes(tmp_path: Path) -> None:
    path, extended = tmp_path / "broken.toml", tmp_path / "later.toml"
    path.write_text(f'extends = ["later.toml"]\n{HEAD}')
    for _ in range(2):
        with pytest.raises(PolicyError) as caught:
            Policy.load(path)
        assert str(caught.value).count("there is no file") == 1
    extended.write_text(RULE)
    assert [rule.id for rule in Policy.load(path).rules] == ["a"]


def test_a_circle_through_several_files_is_refused(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "c"), ("c", "a")):
        (tmp_path / f"{name}.toml").write_text(f'extends = ["{other}.toml"]\n')
    with pytest.raises(PolicyError, match=r"c\.toml:1: extends is circular: a.toml -> b.toml -> c.toml -> a.toml"):
        Policy.load(tmp_path / "a.toml")


@pytest.mark.parametrize("table", ["cuda", "cpu", "accelerators"])
def test_an_op_table_is_not_a_policy(table: str) -> None:
    path = Path(Policy.load("cuda-float16").sources[0]).with_name(f"{table}.toml")
    with pytest.raises(PolicyError, match=rf"policies/{table}\.toml:1: lower_precision_fp is not set: this is an op"):
        Policy.load(path)


def test_a_later_rule_takes_the_place_of_the_earlier(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(HEAD + RULE + RULE.replace('"a"', '"b"'))
    (tmp_path / "two.toml").write_text(RULE.replace("exp", "log"))
    (tmp_path / "all.toml").write_text('extends = ["one.toml", "two.toml"]\noutputs = "keep"\n')
    loaded = Policy.load(tmp_path / "all.toml")
    assert [(rule.id, rule.ops) for rule in loaded.rules] == [("a", ("aten::log",)), ("b", ("aten::exp",))]
    assert loaded.outputs == "keep" and [Path(source).name for source in loaded.sources] == [
        "all.toml", "one.toml", "two.toml"
    ]  # fmt: skip


def test_lines_are_found_in_any_toml() -> None:
    text = '''# "[[rule]]"
title = """
[not.a.table]
x = 1
"""
list = [ # one
  "a]", 'b,', { in = 1, out = [2,
  3] },
]
"quoted key".dotted = 1
[table.sub]
empty = []
date = 1979-05-27 07:32:00
[[rule]]
id = 'x'
[[rule]]
id = "y # no comment"
[rule.more]
deep = true
'''
    expected = {
        ("title",): 2, ("list",): 6, ("list", 0): 7, ("list", 2): 7, ("list", 2, "out"): 7, ("list", 2, "out", 1): 8,
        ("quoted key", "dotted"): 10, ("table", "sub"): 11, ("table", "sub", "date"): 13, ("rule", 0): 14,
        ("rule", 0, "id"): 15, ("rule", 1): 16, ("rule", 1, "id"): 17, ("rule", 1, "more"): 18,
        ("rule", 1, "more", "deep"): 19, ("rule", 1, "nowhere"): 16, ("nowhere",): 1,
    }  # fmt: skip
    lines = index_lines(text)
    assert {path: lines.line(path) for path in expected} == expected
