"""A corpus of broken policy files: each with the message it must give, at the line where the mistake stands."""

from pathlib import Path

import pytest

from fxamp.errors import PolicyError
from fxamp.policy import Policy
from fxamp.policy.file.lines import index_lines

HEAD = 'lower_precision_fp = "float16"\n[match]\ndevice = "cpu"\n'  # three lines
RULE = '[[rule]]\nid = "a"\ncast = "fp32"\nops = ["exp"]\n'  # four lines
KEPT = '[[rule]]\nid = "a"\nkeep = "int8"\nregion = "kept"\nops = ["mm"]\n'  # five lines

CHUNKS = '[[rule]]\nid = "cut"\nops = ["cross_entropy_loss"]\nchunks = 64\n'
BROKEN = {
    "unknown key": ('outptus = "keep"\n' + HEAD, 1, "unknown key 'outptus' in a policy file; .*did you mean 'outputs'"),
    "unknown match key": (HEAD + 'devcie = "cpu"\n', 4, r"unknown key 'devcie' in \[match\]; .*did you mean 'device'"),
    "unknown rule key": (HEAD + RULE + 'op = "log"\n', 8, r"unknown key 'op' in a \[\[rule\]\]; .*did you mean 'ops'"),
    "unknown category": (HEAD + RULE.replace("fp32", "fp23"), 6, "cast = 'fp23' is unknown; .*did you mean 'fp32'"),
    "unknown dtype": (HEAD.replace("float16", "flaot16"), 1, "lower_precision_fp = 'flaot16' .*did you mean 'float16'"),
    "unsupported dtype": (
        HEAD.replace("float16", "float32"),
        1,
        "'float32' is unknown; accepted: 'float16', 'bfloat16'",
    ),
    "unknown device": (HEAD.replace("cpu", "cud"), 3, "device = 'cud' is unknown; .*did you mean 'cuda'"),
    "unknown outputs": ('outputs = "kept"\n' + HEAD, 1, "outputs = 'kept' is unknown; .*did you mean 'keep'"),
    "placement is no key": (
        'placement = "autocast"\n' + HEAD,
        1,
        "unknown key 'placement' in a policy file; accepted: extends, match, lower_precision_fp, .*, rule$",
    ),
    "variant is for shipped files": (
        HEAD + '[variant]\nof = ["cpu-float16"]\n',
        4,
        "unknown key 'variant' in a policy file",
    ),
    "dtype is a number": (
        "lower_precision_fp = 16\n",
        1,
        "lower_precision_fp = 16 has the wrong type; accepted: a string",
    ),
    "extends is a string": ('extends = "cpu.toml"\n' + HEAD, 1, "extends = 'cpu.toml' has .*: a list of strings"),
    "match is a string": ('match = "cpu"\n', 1, "match = 'cpu' has the wrong type; accepted: a table"),
    "rule is a table": (HEAD + '[rule]\nid = "a"\n', 4, r"rule = .* has the wrong type; accepted: .*each \[\[rule\]\]"),
    "ops is a string": (HEAD + RULE.replace('["exp"]', '"exp"'), 7, "ops = 'exp' has the wrong type"),
    "an op is a number": (HEAD + RULE.replace('["exp"]', '["exp", 3]'), 7, "ops = .*3.* has the wrong type"),
    "why is a list": (HEAD + RULE + "why = []\n", 8, r"why = \[\] has the wrong type; accepted: a string"),
    "not TOML": (HEAD + "[[rule]\n", 4, "not TOML: .*line 4"),
    "unclosed string": (HEAD + RULE + 'why = "because\n', 8, "not TOML: "),
    "ends too early": (HEAD + RULE + "why =", 8, "not TOML: "),
    "key twice": (HEAD + RULE + 'cast = "fp32"\n', 8, "not TOML: .*overwrite"),
    "id twice": (HEAD + RULE + RULE, 9, "id = 'a' is used twice; the first is on line 5"),
    "empty id": (HEAD + RULE.replace('"a"', '""'), 5, "id = '' is empty"),
    "no id": (HEAD + RULE.replace('id = "a"\n', ""), 4, r"this \[\[rule\]\] has no id; a rule needs id, cast, and"),
    "no cast": (HEAD + RULE.replace('cast = "fp32"\n', ""), 4, "has no cast"),
    "chunks is a word": (
        HEAD + CHUNKS.replace("64", '"some"'),
        7,
        "chunks = 'some' is not accepted; accepted: 'auto', or",
    ),
    "no chunks": (
        HEAD + CHUNKS.replace("64", "0"),
        7,
        "chunks = 0 is not accepted; accepted: 'auto', or a whole number",
    ),
    "chunks with cast": (HEAD + CHUNKS + 'cast = "fp32"\n', 8, "cast does not go with chunks"),
    "chunks in the backward": (
        HEAD + CHUNKS + 'region = "backward"\n',
        8,
        "region = 'backward' does not go with chunks",
    ),
    "gradients alone": (HEAD + RULE + 'gradients = "forward"\n', 8, "gradients goes with chunks"),
    "unknown gradients": (
        HEAD + CHUNKS + 'gradients = "forwards"\n',
        8,
        "gradients = 'forwards' .*did you mean 'forward'",
    ),
    "no ops": (
        HEAD + RULE.replace('ops = ["exp"]\n', ""),
        4,
        "has no condition; a rule needs one at least of ops, modules,",
    ),
    "empty ops": (HEAD + RULE.replace('"exp"', ""), 7, r"ops = \[\] is empty"),
    "op with a space": (HEAD + RULE.replace('"exp"', '"exp", "my op"'), 7, "'my op' is not an op name; accepted: 'mm'"),
    "op on a later line": (HEAD + RULE.replace('"exp"', '\n"exp", # [\n"lo g",\n'), 9, "'lo g' is not an op name"),
    "empty op": (HEAD + RULE.replace("exp", ""), 7, "'' is not an op name"),
    "op in no style": (HEAD + RULE.replace("exp", "aten.mm.default.x"), 7, "'aten.mm.default.x' is not an op name"),
    "version without sign": (HEAD + RULE + 'torch = "2.12"\n', 8, "'2.12' is not a version comparison; accepted: .*>="),
    "version in words": (HEAD + RULE + 'torch = ">=2.11,new"\n', 8, "'new' is not a version comparison"),
    "wild sign": (HEAD + RULE + 'torch = "~=2.12"\n', 8, "'~=2.12' is not a version comparison"),
    "banned without advice": (HEAD + RULE.replace("fp32", "banned"), 4, "cast = 'banned' but no advice"),
    "advice without ban": (HEAD + RULE + 'advice = "no"\n', 8, "advice is for cast = 'banned', .* cast = 'fp32'"),
    "keep without region": (
        HEAD + RULE + 'keep = "int8"\n',
        8,
        "keep goes with region = 'kept', .* region = 'forward'",
    ),
    "elements of an op": (HEAD + RULE + 'elements = ">4"\n', 8, "elements goes with region = 'kept'"),
    "readers of an op": (HEAD + RULE + 'read_by = ["mm"]\n', 8, "read_by goes with region = 'kept'"),
    "kept without keep": (HEAD + KEPT.replace('keep = "int8"\n', ""), 4, "has no keep; a rule needs id, keep, and"),
    "unknown keep": (HEAD + KEPT.replace("int8", "int9"), 6, "keep = 'int9' is unknown; .*did you mean 'int8'"),
    "cast of a kept value": (HEAD + KEPT + 'cast = "fp32"\n', 9, "cast is for rules on ops, .* goes with keep"),
    "inputs of a kept value": (HEAD + KEPT + 'inputs = { self = "fp32" }\n', 9, "inputs is for rules on ops"),
    "reduces of a kept value": (HEAD + KEPT + 'reduces = ">4"\n', 9, "reduces is for rules on ops"),
    "small block": (HEAD + KEPT + "block = 8\n", 9, "block = 8 is too small; accepted: whole numbers from 16 on"),
    "block of 16 bits": (
        HEAD + KEPT.replace("int8", "bfloat16") + "block = 64\n",
        9,
        "block goes with keep = 'int8' or",
    ),
    "elements in words": (HEAD + KEPT + 'elements = "many"\n', 9, "'many' is not a size"),
    "recompute at random": (
        HEAD + KEPT.replace("int8", "recompute").replace('"mm"', '"mm", "dropout"'),
        8,
        "keep = 'recompute' of aten::dropout, which draws random numbers",
    ),
    "no dtype": (HEAD.partition("\n")[2], 1, "lower_precision_fp is not set: this is an op table, not a policy"),
    "no device": ('lower_precision_fp = "float16"\n', 1, r"\[match\] device is not set"),
    "missing file": (
        "extends = [\n'cpu.toml',\n'cupu.toml']\n" + HEAD,
        3,
        "no file .*cupu.toml.*did you mean 'cpu.toml'",
    ),
    "extends itself": ('extends = ["broken.toml"]\n' + HEAD, 1, "in a circle: broken.toml -> broken.toml"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_at_its_line(case: str, tmp_path: Path) -> None:
    text, line, message = BROKEN[case]
    path = tmp_path / "broken.toml"
    path.write_text(text)
    with pytest.raises(PolicyError, match=rf"broken\.toml:{line}: .*{message}"):
        Policy.load(path)


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
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
    with pytest.raises(PolicyError, match=r"c\.toml:1: extends goes in a circle: a.toml -> b.toml -> c.toml -> a.toml"):
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
