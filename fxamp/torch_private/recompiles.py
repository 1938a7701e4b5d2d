"""Dynamo's limits on how often it compiles one function, and the calls that follow."""

from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

from fxamp.torch_private.dynamo import compiling_frame, context_of, untraced


@dataclass(frozen=True)
class RecompileLimit:
    """One of Dynamo's limits, which it reached for ``code``: it compiles no more graphs of it.

    ``setting``: the limit's name in ``torch._dynamo.config``. ``most``: its value. ``reason``: why the last graph did
    not fit, a line of Dynamo's.
    """

    code: CodeType
    setting: str
    most: int
    reason: str


def on_recompile_limit(reached: Callable[[RecompileLimit], None]) -> None:
    """Call ``reached`` whenever Dynamo is about to give up a function as it reaches a limit, permanently.

    It is not called where Dynamo raises an error instead (``fullgraph=True``, ``fail_on_recompile_limit_hit``). At a
    limit Dynamo calls neither a backend nor the callbacks of :func:`on_each_compilation`. But before, it asks for the
    user's context for its logs, and that calls ``reached``. If torch renames the variables of Dynamo's function,
    limits are not noticed.
    """
    from torch._dynamo.utils import register_hook_for_recompile_user_context

    def ask() -> str:
        limit = _limit_reached()
        if limit is not None:
            reached(limit)
        return ""

    register_hook_for_recompile_user_context(untraced(ask))


def on_each_call(compiled: Any, enter: Callable[[], Callable[[], None]]) -> None:
    """Call ``enter`` before each call of ``compiled``, what torch.compile returned or its context, permanently.

    What ``enter`` returns is called after it. Dynamo traces neither. Breaks loudly.
    """
    context_of(compiled).enter_exit_hooks.append(enter)


def _limit_reached() -> RecompileLimit | None:
    from torch._dynamo import config
    from torch._dynamo.cache_size import exceeds_recompile_limit

    frame = compiling_frame()
    known = {} if frame is None else frame.f_locals
    if config.fail_on_recompile_limit_hit or known.get("one_graph") or not {"cache_size", "compile_id"} <= set(known):
        return None
    exceeded, setting = exceeds_recompile_limit(known["cache_size"], known["compile_id"])
    if not exceeded:
        return None
    reason, *_ = str(known.get("recompile_reason") or "unknown").strip().splitlines()
    return RecompileLimit(known["code"], setting, getattr(config, setting), " ".join(reason.split()))
