"""The process that counts: its torch takes FakeTensors on an absent GPU.

Each line of standard input holds ``{"workload": ..., "policy": ...}``. Its answer is a line of standard output with the
count, or with ``{"error": message}``.
"""

import json
import sys
import traceback
from typing import Any

from fxamp.errors import FxampError
from fxamp.tools.bench.cost.hooks import prepare_torch
from fxamp.tools.bench.cost.workload import Way, Workload


def main() -> None:
    """Count until there are no more requests."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), file=answers, flush=True)


def _answer(given: dict[str, Any]) -> dict[str, Any]:
    try:
        pretended = _torch()
        from fxamp.tools.bench.cost.measure import measure

        return measure(Workload(**given["workload"]), Way(given["policy"]), pretended).as_dict()
    except FxampError as error:
        return {"error": str(error)}
    except Exception as error:
        traceback.print_exc()
        text = str(error).strip().splitlines()
        return {"error": f"{type(error).__name__}: {text[0] if text else 'no message'}"}


def _torch() -> bool:
    """Prepare torch on the first call; returns whether the GPU is pretended."""
    if "torch" not in sys.modules:
        return prepare_torch()
    import torch

    return torch.version.cuda is None


if __name__ == "__main__":
    main()
