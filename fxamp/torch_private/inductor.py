"""What Inductor does with an op."""

from torch._ops import OpOverload


def calls_kernel(target: object) -> bool:
    """Whether Inductor calls the kernel of the op ``target``, instead of writing code for it. Imports Inductor.

    Inductor then passes inputs in the layouts that it chose for them. Breaks loudly.
    """
    from torch._inductor.lowering import fallbacks, lowerings

    return isinstance(target, OpOverload) and (target in fallbacks or target not in lowerings)
