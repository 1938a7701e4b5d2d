"""What the public Python functions reach: every function of torch's op database compared with the real autocast.

A function may call an overload that autocast has no entry for, or a composite of others; and it meets 16-bit values
that other ops made. On the CPU values are compared too.
"""

import pytest
from oracle.public_agreement import accepted, disagreements, policy_for
from oracle.public_gaps import ACCEPTED
from oracle.public_ops import calls
from support.checks.exhaustive import exhaustive
from support.machines.lacks import needs_chunked_loss

# Some functions are deprecated and say so; fake kernels log what they refuse.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("no_logging")]

PARTS = 16


@pytest.mark.parametrize("part", exhaustive(range(PARTS), always=[0]))
@pytest.mark.parametrize("device", exhaustive(["cuda", "cpu"], always=["cpu"]))
def test_a_function_runs_in_autocasts_dtypes(device: str, part: int) -> None:
    """Each function in two mixtures of dtypes, other ones on the other device; the oracle's command tries all."""
    policy, compared, differences = policy_for(device), 0, []
    for number, call in enumerate(calls()):
        if number % PARTS != part:
            continue
        compared += 1
        mixtures = call.two_mixtures(number // PARTS + (device == "cpu"))
        for one in disagreements(call, policy, mixtures):
            if not accepted(call, one):
                differences.append(f"{call.name}, {one.mixture}: {one.how}")
    assert compared > 500 / PARTS
    assert not differences, "\n".join(differences)


@pytest.mark.exhaustive  # it judges the list of accepted differences, not fxamp
def test_nothing_is_accepted_that_does_not_differ() -> None:
    names = {name.partition(" (")[0] for name in ACCEPTED}
    policies = [policy_for("cuda"), policy_for("cpu")]
    differing = {call.name for call in calls(names=sorted(names)) for p in policies if any(disagreements(call, p))}
    assert set(ACCEPTED) <= differing


@pytest.mark.parametrize("device", exhaustive(["cuda", "xpu"], always=["cuda"]))
def test_upsampling_of_16_bit_values_runs_in_float32(device: str) -> None:
    """The functions call overloads of their own, which autocast knows only by what they call."""
    upsampling = list(calls(every=True, names=["nn.functional.interpolate", "nn.functional.upsample"]))[::11]
    assert len(upsampling) > 10
    assert not [call.title for call in upsampling for _ in disagreements(call, policy_for(device))]


@needs_chunked_loss
def test_an_op_of_another_library_gets_the_mixture_that_it_was_captured_with() -> None:
    """Its Python code asked autocast for the dtype to compute in, and handed that on."""
    custom = list(calls(names=["nn.functional.linear_cross_entropy"]))
    assert len(custom) > 1
    assert not [(call.name, one) for call in custom for one in disagreements(call, policy_for("cpu"))]
