"""One op has one name, however it is spelled."""

import pytest

from fxamp.policy import Policy
from fxamp.policy.model.op_names import canonical

TEXT = 'lower_precision_fp = "bfloat16"\n[match]\ndevice = "cpu"\n[[rule]]\nid = "a"\ncast = "fp32"\nops = ["{}"]\n'


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("linear", "aten::linear"),
        ("aten::linear", "aten::linear"),
        ("aten.linear", "aten::linear"),
        ("torch.ops.aten.linear", "aten::linear"),
        ("linear.default", "aten::linear.default"),
        ("aten::linear.default", "aten::linear.default"),
        ("aten.linear.default", "aten::linear.default"),
        ("torch.ops.aten.sum.dim_IntList", "aten::sum.dim_IntList"),
        ("sum.dim_IntList", "aten::sum.dim_IntList"),
        ("prims.convert_element_type", "prims::convert_element_type"),
        ("torch.ops.mylib.op.default", "mylib::op.default"),
        ("mylib::op", "mylib::op"),
        ("aten.conv*", "aten::conv*"),
    ],
)
def test_every_spelling_means_the_same_op(spelled: str, name: str) -> None:
    assert canonical(spelled) == name
    (rule,) = Policy.loads(TEXT.format(spelled)).rules
    assert rule.ops == (name,)


@pytest.mark.parametrize(
    "wrong", ["", "my op", "aten.", "aten.mm.default.x", "torch.ops.aten", "a::b::c", "mylib.op.x.y"]
)
def test_what_is_no_name_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="is not an op name; accepted: 'mm'"):
        canonical(wrong)
