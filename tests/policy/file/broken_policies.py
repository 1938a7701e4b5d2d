"""A corpus of broken policy files: each with the message that it must give, at the line of the mistake."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

HEAD = 'lower_precision_fp = "float16"\n[match]\ndevice = "cpu"\n'
CUDA = HEAD.replace("cpu", "cuda")
SCALE = HEAD + "[loss_scale]\n"
FP32 = '[[rule]]\nid = "a"\ncast = "fp32"\n'
RULE = FP32 + 'ops = ["exp"]\n'
FP8 = FP32.replace("fp32", "fp8") + 'ops = ["mm"]\n'
KEPT = '[[rule]]\nid = "a"\nkeep = "int8"\nregion = "kept"\nops = ["mm"]\n'
CHUNKS = '[[rule]]\nid = "cut"\nops = ["cross_entropy_loss"]\nchunks = 64\n'
DROP = '[[rule]]\nid = "a"\nmodules = ["lm_head"]\ndrop = true\n'

Groups = dict[str, dict[str, str | tuple[int, str]]]


@dataclass(frozen=True)
class Broken:
    """``message``: a pattern. ``beyond_schema``: JSON Schema cannot see the mistake."""

    text: str
    line: int
    message: str
    beyond_schema: bool


PLAIN: Groups = {
    "{}\n" + HEAD: {
        'outptus = "keep"': "unknown key 'outptus' in a policy file; .*did you mean 'outputs'",
        'outputs = "kept"': "outputs = 'kept' is unknown; .*did you mean 'keep'",
        'placement = "autocast"': (
            "unknown key 'placement' in a policy file; accepted: extends, match, lower_precision_fp, .*, rule$"
        ),
        'extends = "cpu.toml"': "extends = 'cpu.toml' has .*: a list of strings",
        'unlisted = "lower"': "unlisted = 'lower' is unknown; .*'lower_precision_fp'",
        'unlisted = "banned"': "unlisted = 'banned' is unknown; accepted: 'follow', 'fp32'",
        "loss_scale = 1024": "loss_scale = 1024 has the wrong type; accepted: a table",
    },
    SCALE + "{}\n": {
        "init = 4": r"unknown key 'init' in \[loss_scale\]; .*did you mean 'init_scale'",
        "growth_interval = 0": "growth_interval = 0 is out of range; accepted: a whole",
        "growth_interval = 1.5": "growth_interval = 1.5 has .*accepted: a whole number",
        'init_scale = "big"': "init_scale = 'big' has the wrong type; accepted: a number",
        "init_scale = true": "init_scale = True has the wrong type; accepted: a number",
        'enabled = "no"': "enabled = 'no' has the wrong type; accepted: true or false",
    },
    CUDA + "{}\n": {
        'capability = "8.0"': "'8.0' is not a compute capability; accepted: .*'>=8.0'",
        "capability = 8.0": "capability = 8.0 has the wrong type; accepted: a string",
        'arch = ["gfx950", "sm_90"]': "'sm_90' is not an AMD GPU's architecture",
    },
    HEAD + KEPT + "{}\n": {
        "block = 8": "block = 8 is too small; accepted: whole numbers from 16 on",
        'elements = "many"': "'many' is not a size",
    },
    HEAD + DROP + "{}\n": {
        'region = "backward"': "region = 'backward' does not go with drop; accepted: 'results', or no region",
    },
    HEAD + DROP.replace("drop = true", "{}"): {
        "drop = false": "drop = false has no effect; accepted: true, or",
    },
    HEAD + CHUNKS + "{}\n": {
        'gradients = "forwards"': "gradients = 'forwards' .*did you mean 'forward'",
        'region = "backward"': "region = 'backward' does not go with chunks; accepted: 'loss', or no region",
    },
    HEAD + FP8 + "{}\n": {
        'recipe = "tensor"': "recipe = 'tensor' is unknown; .*did you mean 'tensorwise'",
        'recipe = "delayed_scaling"': (
            "recipe = 'delayed_scaling': delayed scaling, .* is not supported; accepted: 'tensorwise', 'rowwise'"
        ),
    },
    HEAD + RULE + "{}\n": {
        'op = "log"': r"unknown key 'op' in a \[\[rule\]\]; .*did you mean 'ops'",
        "why = []": r"why = \[\] has the wrong type; accepted: a string",
        'why = "because': "not TOML: ",
        'cast = "fp32"': "not TOML: .*overwrite",
        'torch = "2.12"': "'2.12' is not a version comparison; accepted: .*>=",
        'torch = ">=2.11,new"': "'new' is not a version comparison",
        'torch = "~=2.12"': "'~=2.12' is not a version comparison",
        'region = "backwards"': "region = 'backwards' is unknown; .*did you mean 'backward'",
        'torch = "%2"': "'%2' is not a version comparison",
        '[rule.inputs]\nbias = "fp32"\nweight = "float32"': (
            10,
            "weight = 'float32' is unknown; accepted: 'lower_precision_fp', 'fp32', 'follow'.*did you mean",
        ),
        'inputs = ["weight"]': "inputs = .* has the wrong type; accepted: a table",
        'enabled = false\nwhyy = "x"': (9, "unknown key 'whyy' .*did you mean 'why'"),
        "enabled = 0": "enabled = 0 has the wrong type; accepted: true or false",
    },
    HEAD + FP32 + "[rule.args]\n{}\n": {
        'dim = -1\nself = { sise = ">4" }': (
            9,
            "'sise': '>4'.* is not a condition on an argument; accepted: dtype, rank, size, shape.*did you mean 'size'",
        ),
        'self = { size = "large" }': "'large' is not a size; accepted: a whole",
        'self = { size = ">4.5" }': "'>4.5' is not a size",
        "self = { size = 4.5 }": "4.5 is not a size",
        "self = { size = true }": "True is not a size",
        "self = { rank = [2, 3] }": r"\[2, 3\] is not a size",
        'self = { dtype = "flaot32" }': "dtype 'flaot32' is unknown; accepted: float16, .*did you mean 'float32'",
        "self = { shape = 4 }": "shape = 4 is not a shape; accepted: a list",
        'self = { shape = ["batch", 4] }': "'batch' is not a size",
        "dim = [{ a = 1 }]": "is not a value; accepted: a number, a string",
        "dim = 1979-05-27": "is not a value; accepted",
    },
    HEAD + FP32 + "{}\n": {
        'ops = "exp"': "ops = 'exp' has the wrong type",
        'ops = ["exp", 3]': "ops = .*3.* has the wrong type",
        'region = "backward"': (4, "has no condition"),
        'modules = "lm_head"': "modules = 'lm_head' has .*: a list of strings",
        'args = ["dim"]': "args = .* has the wrong type; accepted: a table",
        "args = {}": "args is empty; accepted: argument names with conditions",
        "args = { self = {} }": "{} is not a condition on an argument; accepted: dtype,",
        'reduces = "many"': "'many' is not a size",
        "reduces = 4096.0": "reduces = 4096.0 has the wrong type; accepted: a whole",
    },
    HEAD + CHUNKS.replace("64", "{}"): {
        '"some"': "chunks = 'some' is not accepted; accepted: 'auto', or",
        "0": "chunks = 0 is not accepted; accepted: 'auto', or a whole number",
    },
    HEAD + KEPT.replace("int8", "{}"): {
        "int9": "keep = 'int9' is unknown; .*did you mean 'int8'",
    },
    HEAD.replace("float16", "{}"): {
        "flaot16": "lower_precision_fp = 'flaot16' .*did you mean 'float16'",
        "float32": "'float32' is unknown; accepted: 'float16', 'bfloat16'",
    },
    HEAD.replace("cpu", "{}"): {
        "cud": "device = 'cud' is unknown; .*did you mean 'cuda'",
    },
    HEAD + RULE.replace("fp32", "{}"): {
        "fp23": "cast = 'fp23' is unknown; .*did you mean 'fp32'",
        "nvfp5": "cast = 'nvfp5' is unknown; .*did you mean 'nvfp4'",
        "mxfp6": "cast = 'mxfp6' is unknown; .*did you mean 'mxfp8'",
    },
    HEAD + "{}\n": {
        'devcie = "cpu"': r"unknown key 'devcie' in \[match\]; .*did you mean 'device'",
        '[variant]\nof = ["cpu-float16"]': "unknown key 'variant' in a policy file",
        '[rule]\nid = "a"': r"rule = .* has the wrong type; accepted: .*each \[\[rule\]\]",
        "[[rule]": "not TOML: .*line 4",
        '[[rule]]\ncast = "fp32"\nops = ["exp"]': r"this \[\[rule\]\] has no id; a rule needs id, cast, and",
        '[[rule]]\nid = "a"\nops = ["exp"]': "has no cast",
        '[[rule]]\nid = "a"\nregion = "kept"\nops = ["mm"]': "has no keep; a rule needs id, keep, and",
        'cpu_features = [\n"avx2",\n"avx512bf16"]': (
            6,
            "'avx512bf16' is not a CPU feature that torch reports; .*did you mean 'avx512_bf16'",
        ),
        'cpu_features = "avx2"': "cpu_features = 'avx2' has .*: a list of strings",
        'torch = "new"': "'new' is not a version comparison",
        '[[rule]]\nid = "a"\ncast = "fp32"': (
            "this .* has no condition; a rule needs at least one of ops, modules, module_classes"
        ),
        "[[rule]]\nenabled = false": "has no id",
    },
    "{}": {
        "lower_precision_fp = 16\n": (1, "lower_precision_fp = 16 has the wrong type; accepted: a string"),
        'match = "cpu"\n': (1, "match = 'cpu' has the wrong type; accepted: a table"),
        HEAD + '[[rule]]\nid = "a"\ncast = "fp32"\nops = ["exp"]\nwhy =': (8, "not TOML: "),
    },
}
"""By what is around it, a mistake and its message; with its line where that is not its own first one."""

BEYOND: Groups = {
    HEAD + FP32 + "[rule.args]\n{}\n": {
        'self = { size = ">10,<5" }': "no number meets '>10,<5'; accepted: a whole",
        'self = { size = ">4,<8,%8" }': "no number meets '>4,<8,%8'; accepted: a whole",
    },
    "{}\n" + HEAD: {
        "extends = [\n'cpu.toml',\n'cupu.toml']": (3, "no file .*cupu.toml.*did you mean 'cpu.toml'"),
        'extends = ["broken.toml"]': "is circular: broken.toml -> broken.toml",
    },
    SCALE + "{}\n": {
        "init_scale = -1.0": "init_scale = -1.0 is out of range; accepted: a positive finite",
        "max_scale = inf": "max_scale = inf is out of range; accepted: a positive finite",
        "init_scale = 1e39": r"init_scale = 1e\+39 is out of bounds; accepted: .*e\+38",
        "growth_factor = 1.0": "growth_factor = 1.0 is out of range; .*above 1",
        "backoff_factor = 2": "backoff_factor = 2 is out of range; .*between 0 and 1",
        "min_scale = 8\nmax_scale = 4": "min_scale = 8 is above max_scale = 4",
        "min_scale = 8\ninit_scale = 4": (6, "init_scale = 4 is out of bounds; .*from 8 to"),
    },
    HEAD + "{}\n": {
        '[[rule]]\nid = "a"\ncast = "mxfp8"\nops = ["mm"]\nrecipe = "rowwise"': (
            "recipe = 'rowwise' is unknown; accepted: 'floor', 'rceil', 'rceil_wgrad_with_hp'"
        ),
    },
    CUDA + "{}\n": {
        'cpu_features = ["avx2"]': "cpu_features is for device = 'cpu'",
    },
    HEAD + KEPT + "{}\n": {
        'cast = "fp32"': "cast does not go with keep; accepted: one of cast, chunks, drop, keep",
        'inputs = { self = "fp32" }': "inputs goes with cast, not with keep",
        'reduces = ">4"': "reduces goes with cast, not with keep",
        'recipe = "rowwise"': "recipe goes with cast, not with keep",
    },
    HEAD + KEPT.replace("int8", "bfloat16") + "{}\n": {
        "block = 64": "block goes with keep = 'int8' or",
    },
    HEAD + KEPT.replace("int8", "recompute").replace('["mm"]', "{}"): {
        '["mm", "dropout"]': "keep = 'recompute' of aten::dropout, which draws random numbers",
    },
    HEAD + CHUNKS + "{}\n": {
        'cast = "fp32"': "cast does not go with chunks",
    },
    HEAD + DROP + "{}\n": {
        'cast = "fp32"': "cast does not go with drop",
        "chunks = 4": "chunks does not go with drop",
    },
    HEAD + FP8 + "{}\n": {
        'recipe = "rowwise"\nregion = "both"': (
            9,
            "region = 'both' goes with cast = 'lower_precision_fp' or 'fp32', but this rule has cast = 'fp8'",
        ),
    },
    HEAD + FP8.replace('["mm"]', "{}") + 'recipe = "rowwise"\n': {
        '["mm", "softmax.int"]': "cast = 'fp8' is for the ops linear, .*, not for 'aten::softmax.int'",
    },
    HEAD + RULE.replace("fp32", "promote") + "{}\n": {
        'region = "both"': (
            "region = 'both' goes with cast = 'lower_precision_fp' or 'fp32', but this rule has cast = 'promote'"
        ),
        'inputs = { weight = "fp32" }': "inputs goes with cast = .*, but this rule has cast = 'promote'",
    },
    HEAD + RULE + "{}\n": {
        '[[rule]]\nid = "a"\ncast = "fp32"\nops = ["exp"]': (9, "id = 'a' is used twice; the first is on line 5"),
        'gradients = "forward"': "gradients goes with chunks",
        'advice = "no"': "advice goes with cast = 'banned', .* cast = 'fp32'",
        'keep = "int8"': "keep does not go with cast",
        'elements = ">4"': "elements goes with chunks or drop or keep, not with cast",
        'read_by = ["mm"]': "read_by goes with keep, not with cast",
        'recipe = "rowwise"': "recipe goes with cast = 'fp8'",
    },
    HEAD + FP32 + "[rule.args]\n{}\n": {
        'self = { size = "%0" }': "'%0' is not a size",
        "self = { dtype = [] }": r"dtype = \[\] has the wrong type",
        'self = { shape = ["...", 4, "..."] }': "is not a shape; .*once",
    },
    HEAD + FP32 + "{}\n": {
        "ops = []": r"ops = \[\] is empty",
        'ops = ["exp", "my op"]': "'my op' is not an op name; accepted: 'mm'",
        'ops = [\n"exp", # [\n"lo g",\n]': (9, "'lo g' is not an op name"),
        'ops = [""]': "'' is not an op name",
        'ops = ["aten.mm.default.x"]': "'aten.mm.default.x' is not an op name",
        'modules = ["lm head"]': "'lm head' is not a module path; accepted: a dotted",
        'modules = ["a",\n"b..c"]': (8, r"'b\.\.c' is not a module path"),
        'modules = [""]': "'' is not a module path",
        "modules = []": r"modules = \[\] is empty",
        'module_classes = ["Layer Norm"]': "'Layer Norm' is not a class name",
    },
    HEAD + RULE.replace("fp32", "{}"): {
        "banned": (4, "cast = 'banned' needs advice"),
    },
    HEAD + RULE.replace('"a"', '"{}"'): {
        "": "id = '' is empty",
        "unlisted": "id = 'unlisted' is what reports call the key unlisted",
        "  ": "id = '  ' is empty",
    },
    HEAD + "{}\n": {
        'capability = ">=8.0"': "capability is for device = 'cuda', .*device = 'cpu'",
        'arch = ["gfx950"]': "arch is for device = 'cuda', .*device = 'cpu'",
        "cpu_features = []": r"cpu_features = \[\] is empty; accepted: a list with at least one",
        '[[rule]]\nid = "a"\ncast = "fp8"\nops = ["mm"]': "cast = 'fp8' needs a recipe; accepted: 'tensorwise'",
        '[[rule]]\nid = "a"\ncast = "mxfp8"\nops = ["mm"]': "cast = 'mxfp8' needs a recipe; accepted: 'floor'",
        '[[rule]]\nid = "a"\ncast = "nvfp4"\nops = ["mm"]': "cast = 'nvfp4' needs a recipe; accepted: 'pretraining'",
        '[[rule]]\nid = "a"\ncast = "fp8"\nrecipe = "rowwise"\nmodules = ["mlp"]': (
            "cast = 'fp8' is for the ops linear, .*, but this rule names no ops"
        ),
    },
    "{}": {
        '[match]\ndevice = "cpu"\n': (1, "lower_precision_fp is not set: this is an op table, not a policy"),
        'lower_precision_fp = "float16"\n': (1, r"\[match\] device is not set"),
        'extends = ["cpu.toml"]\n' + HEAD + '[[rule]]\nid = "reduction"\nenabled = false\n': (
            5,
            "enabled = false, but no file .* extends has a rule 'reduction' .*did you mean 'reductions'",
        ),
    },
}
"""The same of mistakes that JSON Schema cannot see: other values, keys or files decide, or the range of a number."""


def _corpus(groups: Groups, beyond_schema: bool) -> Iterator[tuple[str, Broken]]:
    for around, mistakes in groups.items():
        place = around.partition("{}")[0].count("\n") + 1
        for mistake, expected in mistakes.items():
            line, message = expected if isinstance(expected, tuple) else (place, expected)
            text = around.replace("{}", mistake, 1)
            yield f"{text.removeprefix(HEAD)!r}", Broken(text, line, message, beyond_schema)


BROKEN = dict([*_corpus(PLAIN, False), *_corpus(BEYOND, True)])


def parsed(text: str) -> dict[str, Any] | None:
    """What TOML makes of ``text``; None if it is no TOML."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None
