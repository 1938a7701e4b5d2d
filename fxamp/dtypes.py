"""The dtypes that policies cast to, each defined only here. Imports no torch.

A new 16-bit dtype needs a name here, and then

    its arithmetic in kernels      fxamp/kernels/gradient_triton.py; fxamp/optim/kernels: expressions.py, step_triton.py
    a plan for its gradients       fxamp/kernels/launch_plan.py
    its short name in listings     fxamp/graph/printing.py, fxamp/graph_text/model.py
    conditions on its name         fxamp/policy/model/conditions.py

8-bit dtypes are not targets of casts. Each of their uses has its own list:

    products in fp8                fxamp/policy/model/recipe.py; their arithmetic is in fxamp/kernels/products
    tensors saved for backward     fxamp/policy/model/keep_rule.py; their arithmetic: passes/shared/kept_packing.py
    an optimizer's state           fxamp/policy/model/optimizer_table.py, fxamp/optim/precision; its arithmetic:
                                   fxamp/kernels/blockwise_8bit.py

``fxamp/torch_dtypes.py`` has torch's dtype for each name.
"""

DTYPES = ("float16", "bfloat16")
"""The values of a policy's ``lower_precision_fp``."""

SCALED_DTYPES = frozenset({"float16"})
"""Those of :data:`DTYPES` whose range is so small that gradients underflow unless the loss is scaled."""
