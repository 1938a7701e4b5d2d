"""Broken policies of the whole language, beside those of test_policy_mistakes: each with its message and line."""

from pathlib import Path

import pytest
from test_policy_mistakes import BROKEN as PLAIN

from fxamp.errors import PolicyError
from fxamp.policy import Policy

HEAD = 'lower_precision_fp = "float16"\n[match]\ndevice = "cpu"\n'  # three lines
RULE = '[[rule]]\nid = "a"\ncast = "fp32"\n'  # three lines, and no condition yet
OPS = RULE + 'ops = ["exp"]\n'
FP8 = RULE.replace("fp32", "fp8") + 'ops = ["mm"]\n'
CUDA = HEAD.replace("cpu", "cuda")
SCALE = HEAD + "[loss_scale]\n"  # four lines

BROKEN = {
    "unlisted in words": ('unlisted = "lower"\n' + HEAD, 1, "unlisted = 'lower' is unknown; .*'lower_precision_fp'"),
    "unlisted banned": (
        'unlisted = "banned"\n' + HEAD,
        1,
        "unlisted = 'banned' is unknown; accepted: 'follow', 'fp32'",
    ),
    "capability without sign": (
        CUDA + 'capability = "8.0"\n',
        4,
        "'8.0' is not a compute capability; accepted: .*'>=8.0'",
    ),
    "capability is a number": (
        CUDA + "capability = 8.0\n",
        4,
        "capability = 8.0 has the wrong type; accepted: a string",
    ),
    "capability of a CPU": (HEAD + 'capability = ">=8.0"\n', 4, "capability is for device = 'cuda', .*device = 'cpu'"),
    "an NVIDIA GPU among AMD's": (CUDA + 'arch = ["gfx950", "sm_90"]\n', 4, "'sm_90' is not an AMD GPU's architecture"),
    "architecture of a CPU": (HEAD + 'arch = ["gfx950"]\n', 4, "arch is for device = 'cuda', .*device = 'cpu'"),
    "features of a GPU": (CUDA + 'cpu_features = ["avx2"]\n', 4, "cpu_features is for device = 'cpu'"),
    "unknown feature": (
        HEAD + 'cpu_features = [\n"avx2",\n"avx512bf16"]\n',
        6,
        "'avx512bf16' is not a CPU feature that torch reports; .*did you mean 'avx512_bf16'",
    ),
    "no features": (
        HEAD + "cpu_features = []\n",
        4,
        r"cpu_features = \[\] is empty; accepted: a list with at least one",
    ),
    "features as a string": (HEAD + 'cpu_features = "avx2"\n', 4, "cpu_features = 'avx2' has .*: a list of strings"),
    "match torch in words": (HEAD + 'torch = "new"\n', 4, "'new' is not a version comparison"),
    "unknown loss scale key": (
        SCALE + "init = 4\n",
        5,
        r"unknown key 'init' in \[loss_scale\]; .*did you mean 'init_scale'",
    ),
    "negative scale": (
        SCALE + "init_scale = -1.0\n",
        5,
        "init_scale = -1.0 is out of range; accepted: a positive finite",
    ),
    "infinite scale": (SCALE + "max_scale = inf\n", 5, "max_scale = inf is out of range; accepted: a positive finite"),
    "scale above float32": (
        SCALE + "init_scale = 1e39\n",
        5,
        r"init_scale = 1e\+39 is out of bounds; accepted: .*e\+38",
    ),
    "shrinking growth": (SCALE + "growth_factor = 1.0\n", 5, "growth_factor = 1.0 is out of range; .*above 1"),
    "growing back-off": (SCALE + "backoff_factor = 2\n", 5, "backoff_factor = 2 is out of range; .*between 0 and 1"),
    "interval of nothing": (
        SCALE + "growth_interval = 0\n",
        5,
        "growth_interval = 0 is out of range; accepted: a whole",
    ),
    "interval in halves": (
        SCALE + "growth_interval = 1.5\n",
        5,
        "growth_interval = 1.5 has .*accepted: a whole number",
    ),
    "scale as text": (SCALE + 'init_scale = "big"\n', 5, "init_scale = 'big' has the wrong type; accepted: a number"),
    "scale as a switch": (SCALE + "init_scale = true\n", 5, "init_scale = True has the wrong type; accepted: a number"),
    "enabled in words": (SCALE + 'enabled = "no"\n', 5, "enabled = 'no' has the wrong type; accepted: true or false"),
    "bounds that cross": (SCALE + "min_scale = 8\nmax_scale = 4\n", 5, "min_scale = 8 is above max_scale = 4"),
    "start below the floor": (
        SCALE + "min_scale = 8\ninit_scale = 4\n",
        6,
        "init_scale = 4 is out of bounds; .*from 8 to",
    ),
    "loss scale as a number": (
        "loss_scale = 1024\n" + HEAD,
        1,
        "loss_scale = 1024 has the wrong type; accepted: a table",
    ),
    "no condition": (
        HEAD + RULE,
        4,
        "this .* has no condition; a rule needs one at least of ops, modules, module_classes",
    ),
    "region alone": (HEAD + RULE + 'region = "backward"\n', 4, "has no condition"),
    "unknown region": (
        HEAD + OPS + 'region = "backwards"\n',
        8,
        "region = 'backwards' is unknown; .*did you mean 'backward'",
    ),
    "promote in the backward": (
        HEAD + OPS.replace("fp32", "promote") + 'region = "both"\n',
        8,
        "region = 'both' goes with cast = 'lower_precision_fp' or 'fp32', but this rule has cast = 'promote'",
    ),
    "inputs of a promotion": (
        HEAD + OPS.replace("fp32", "promote") + 'inputs = { weight = "fp32" }\n',
        8,
        "inputs goes with cast = .*, but this rule has cast = 'promote'",
    ),
    "fp8 without a recipe": (HEAD + FP8, 4, "cast = 'fp8' needs a recipe; accepted: 'tensorwise'"),
    "fp8 without ops": (
        HEAD + RULE.replace("fp32", "fp8") + 'recipe = "rowwise"\nmodules = ["mlp"]\n',
        4,
        "cast = 'fp8' is for the ops linear, mm, addmm, matmul, but this rule names no ops",
    ),
    "fp8 of a softmax": (
        HEAD + FP8.replace('"mm"', '"mm", "softmax.int"') + 'recipe = "rowwise"\n',
        7,
        "cast = 'fp8' is for the ops linear, mm, addmm, matmul, not for 'aten::softmax.int'",
    ),
    "a recipe without fp8": (HEAD + OPS + 'recipe = "rowwise"\n', 8, "recipe goes with cast = 'fp8'"),
    "unknown recipe": (
        HEAD + FP8 + 'recipe = "tensor"\n',
        8,
        "recipe = 'tensor' is unknown; .*did you mean 'tensorwise'",
    ),
    "delayed scaling": (
        HEAD + FP8 + 'recipe = "delayed_scaling"\n',
        8,
        "recipe = 'delayed_scaling': delayed scaling, .* is not supported; accepted: 'tensorwise', 'rowwise'",
    ),
    "NVFP4": (HEAD + OPS.replace("fp32", "nvfp4"), 6, "cast = 'nvfp4': NVFP4, .* is not supported; accepted: 'lower"),
    "MXFP8": (HEAD + OPS.replace("fp32", "mxfp8"), 6, "cast = 'mxfp8': MXFP8, .* is not supported; accepted: 'lower"),
    "fp8 in the backward": (
        HEAD + FP8 + 'recipe = "rowwise"\nregion = "both"\n',
        9,
        "region = 'both' goes with cast = 'lower_precision_fp' or 'fp32', but this rule has cast = 'fp8'",
    ),
    "recipe of a kept value": (
        HEAD + RULE.replace('cast = "fp32"', 'keep = "int8"') + 'ops = ["exp"]\nregion = "kept"\nrecipe = "rowwise"\n',
        9,
        "recipe is for rules on ops, but this rule has region = 'kept'",
    ),
    "multiple of nothing": (HEAD + RULE + '[rule.args]\nself = { size = "%0" }\n', 8, "'%0' is not a size"),
    "multiple of a version": (HEAD + OPS + 'torch = "%2"\n', 8, "'%2' is not a version comparison"),
    "unknown input dtype": (
        HEAD + OPS + '[rule.inputs]\nbias = "fp32"\nweight = "float32"\n',
        10,
        "weight = 'float32' is unknown; accepted: 'lower_precision_fp', 'fp32', 'follow'.*did you mean",
    ),
    "inputs as a list": (HEAD + OPS + 'inputs = ["weight"]\n', 8, "inputs = .* has the wrong type; accepted: a table"),
    "module with a space": (
        HEAD + RULE + 'modules = ["lm head"]\n',
        7,
        "'lm head' is not a module path; accepted: a dotted",
    ),
    "module of dots": (HEAD + RULE + 'modules = ["a",\n"b..c"]\n', 8, r"'b\.\.c' is not a module path"),
    "empty module": (HEAD + RULE + 'modules = [""]\n', 7, "'' is not a module path"),
    "no modules": (HEAD + RULE + "modules = []\n", 7, r"modules = \[\] is empty"),
    "modules as a string": (HEAD + RULE + 'modules = "lm_head"\n', 7, "modules = 'lm_head' has .*: a list of strings"),
    "class with a space": (HEAD + RULE + 'module_classes = ["Layer Norm"]\n', 7, "'Layer Norm' is not a class name"),
    "args as a list": (HEAD + RULE + 'args = ["dim"]\n', 7, "args = .* has the wrong type; accepted: a table"),
    "empty args": (HEAD + RULE + "args = {}\n", 7, "args is empty; accepted: argument names with conditions"),
    "empty condition": (
        HEAD + RULE + "args = { self = {} }\n",
        7,
        "{} is not a condition on an argument; accepted: dtype,",
    ),
    "unknown condition": (
        HEAD + RULE + '[rule.args]\ndim = -1\nself = { sise = ">4" }\n',
        9,
        "'sise': '>4'.* is not a condition on an argument; accepted: dtype, rank, size, shape.*did you mean 'size'",
    ),
    "size in words": (
        HEAD + RULE + '[rule.args]\nself = { size = "large" }\n',
        8,
        "'large' is not a size; accepted: a whole",
    ),
    "size in parts": (HEAD + RULE + '[rule.args]\nself = { size = ">4.5" }\n', 8, "'>4.5' is not a size"),
    "size as a float": (HEAD + RULE + "[rule.args]\nself = { size = 4.5 }\n", 8, "4.5 is not a size"),
    "size as a switch": (HEAD + RULE + "[rule.args]\nself = { size = true }\n", 8, "True is not a size"),
    "rank as a list": (HEAD + RULE + "[rule.args]\nself = { rank = [2, 3] }\n", 8, r"\[2, 3\] is not a size"),
    "unknown tensor dtype": (
        HEAD + RULE + '[rule.args]\nself = { dtype = "flaot32" }\n',
        8,
        "dtype 'flaot32' is unknown; accepted: float16, .*did you mean 'float32'",
    ),
    "no dtypes": (HEAD + RULE + "[rule.args]\nself = { dtype = [] }\n", 8, r"dtype = \[\] has the wrong type"),
    "shape as a number": (
        HEAD + RULE + "[rule.args]\nself = { shape = 4 }\n",
        8,
        "shape = 4 is not a shape; accepted: a list",
    ),
    "two ellipses": (HEAD + RULE + '[rule.args]\nself = { shape = ["...", 4, "..."] }\n', 8, "is not a shape; .*once"),
    "shape of words": (HEAD + RULE + '[rule.args]\nself = { shape = ["batch", 4] }\n', 8, "'batch' is not a size"),
    "value of tables": (
        HEAD + RULE + "[rule.args]\ndim = [{ a = 1 }]\n",
        8,
        "is not a value; accepted: a number, a string",
    ),
    "value is a date": (HEAD + RULE + "[rule.args]\ndim = 1979-05-27\n", 8, "is not a value; accepted"),
    "reduces in words": (HEAD + RULE + 'reduces = "many"\n', 7, "'many' is not a size"),
    "reduces as a float": (
        HEAD + RULE + "reduces = 4096.0\n",
        7,
        "reduces = 4096.0 has the wrong type; accepted: a whole",
    ),
    "removed but never there": (
        'extends = ["cpu.toml"]\n' + HEAD + '[[rule]]\nid = "reduction"\nenabled = false\n',
        5,
        "enabled = false, but no file .* extends has a rule 'reduction' .*did you mean 'reductions'",
    ),
    "removed without an id": (HEAD + "[[rule]]\nenabled = false\n", 4, "has no id"),
    "switched off with a typo": (
        HEAD + OPS + 'enabled = false\nwhyy = "x"\n',
        9,
        "unknown key 'whyy' .*did you mean 'why'",
    ),
    "enabled as a number": (HEAD + OPS + "enabled = 0\n", 8, "enabled = 0 has the wrong type; accepted: true or false"),
    "reserved id": (
        HEAD + OPS.replace('"a"', '"unlisted"'),
        5,
        "id = 'unlisted' is what reports call the key unlisted",
    ),
    "blank id": (HEAD + OPS.replace('"a"', '"  "'), 5, "id = '  ' is empty"),
}


def test_the_corpus_is_large() -> None:
    assert len(BROKEN) >= 60 and len(BROKEN) + len(PLAIN) >= 100


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_policy_is_refused_at_its_line(case: str, tmp_path: Path) -> None:
    text, line, message = BROKEN[case]
    path = tmp_path / "broken.toml"
    path.write_text(text)
    with pytest.raises(PolicyError, match=rf"broken\.toml:{line}: .*{message}") as caught:
        Policy.load(path)
    assert str(caught.value).count("\n") == 0, "one mistake, one line"
    with pytest.raises(PolicyError, match=rf"^a name:{line}: "):
        Policy.loads(text, "a name")


def test_every_mistake_of_the_corpus_is_told_when_they_come_together(tmp_path: Path) -> None:
    rules = [text.removeprefix(HEAD) for text, _, _ in BROKEN.values() if text.startswith(HEAD + "[[rule]]")]
    path = tmp_path / "broken.toml"
    path.write_text(HEAD + "".join(text.replace('"a"', f'"a{at}"') for at, text in enumerate(rules)))
    with pytest.raises(PolicyError) as caught:
        Policy.load(path)
    lines = [int(mistake.partition("broken.toml:")[2].partition(":")[0]) for mistake in str(caught.value).splitlines()]
    assert len(lines) >= len(rules) > 30 and lines == sorted(lines)
