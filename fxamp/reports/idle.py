"""Warn if a model was compiled with fxamp but runs without any of its graphs.

If Dynamo skips a function of a model, the log says so at once. If Dynamo has nothing to compile, as for a copy of the
model, or if a graph breaks before its first op, fxamp notices in the first step of an optimizer.
"""

import gc
import logging
import sys
import weakref
from typing import Any

import torch
from torch._dynamo import config
from torch.optim.optimizer import register_optimizer_step_post_hook

from fxamp.graph.submodules import named_parameters
from fxamp.reports.break_reasons import RUNS_ON, ended_functions, ended_now, skipped_functions, skipped_now
from fxamp.reports.recompile_limits import any_limit, under_autocast, watch_limits
from fxamp.reports.registry import all_ran, graphs_that_ended, is_fxamp, records_of, runs_for_any
from fxamp.reports.runs import caller, compiled_call, original
from fxamp.torch_private import backend_of, on_each_compilation

log = logging.getLogger(__name__)

#: Modules and functions with a skipped function that was logged, as weak references by id.
_warned: dict[int, weakref.ref[Any]] = {}

#: Modules and functions whose first graph a break ended, as weak references, until an optimizer steps.
_ended: list[weakref.ref[Any]] = []

_stepped: "weakref.WeakSet[torch.optim.Optimizer]" = weakref.WeakSet()

_SKIPPED = (
    "%s is compiled with fxamp, but Dynamo skips one of its functions, which runs as written (functions that it "
    "calls may be compiled; fxamp.report lists all graphs): %s"
)
_RUNS_ON = (
    "%s is compiled with fxamp, but after a graph break Dynamo does not compile the rest of one of its functions, "
    "which runs as written (functions that it calls may be compiled; fxamp.report lists all graphs): %s"
)
_NO_GRAPH = "%s is compiled with fxamp, but none of its graphs ran in the first step, so it trains as written: %s"
_OTHER_TRAINS = (
    "%s is compiled with fxamp, but did not run in the first step; a similar model trains, which is not compiled: %s"
)
_COPY = (
    "if that is a copy, copy.deepcopy and pickle leave out what torch.compile made. Compile the copy too: "
    'copy.compile(backend="fxamp", options=...)'
)


def _warn_of_skip(*_: object) -> None:
    """Warn if Dynamo gives up a function compiled with fxamp before a graph ran, or the rest of one after a break."""
    skipped, compiled = skipped_now(), caller(sys._getframe(1))
    if compiled is None or not is_fxamp(backend_of(compiled_call(sys._getframe(1)))):
        return
    if skipped and not records_of(compiled):
        _warn(compiled, _SKIPPED, skipped)
    elif ended_now():
        _ended.append(weakref.ref(compiled))
    rest = _rest_without_casts(compiled)
    if rest:
        _warn(compiled, _RUNS_ON, rest)


def _rest_without_casts(compiled: Any) -> str:
    """Return the break after which a function of ``compiled`` runs on without the casts of its graphs; "" if none."""
    ended = [graph for graph in graphs_that_ended(RUNS_ON) if not graph.under_autocast and graph.ran_for(compiled)]
    if not ended or under_autocast() or not any(record.casts for record in records_of(compiled)):
        return ""
    return ended[0].record.ended


on_each_compilation(lambda *_: None, _warn_of_skip)


def _after_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Note a step of any optimizer; a step without gradients, or with a learning rate of 0, only creates state."""
    if torch.compiler.is_compiling() or optimizer in _stepped:
        return
    gradients = any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])
    if gradients and any(group.get("lr", 1) != 0 for group in optimizer.param_groups):
        stepped(optimizer)


register_optimizer_step_post_hook(_after_step)


def stepped(optimizer: torch.optim.Optimizer) -> None:
    """Note a step, skipped or not; the first one may warn."""
    if optimizer in _stepped:
        return
    _stepped.add(optimizer)
    ended = [compiled for reference in _ended if (compiled := reference()) is not None]
    _ended.clear()
    if warn_idle(optimizer):
        return
    for compiled in ended:
        if not records_of(compiled):
            warn_of(compiled)


def warn_idle(optimizer: torch.optim.Optimizer) -> bool:
    """Warn if ``optimizer`` steps modules compiled with fxamp without a graph that ran; return whether it did.

    Training without any module compiled with fxamp is valid: ``GradScaler`` supports it too. The search covers all
    objects of the process and takes about 0.2 s, so it runs only if something was compiled with fxamp for which no
    graph ran, and no graph read any of the parameters. Where Dynamo reached its recompile limit, the search also runs
    if graphs read some of the parameters, and calls of the models without a graph are counted from here on.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    trains = runs_for_any(parameters)
    if all_ran() or (trains and not any_limit()):
        return False
    modules = [module for module in gc.get_objects() if issubclass(type(module), torch.nn.Module)]
    idle = [module for module in modules if is_fxamp(backend_of(_entry(module))) and not records_of(module)]
    idle = [module for module in idle if not watch_limits(original(module), _entry(module))]
    if trains:
        return False
    classes = {type(original(module)) for module in idle}
    trained = set(map(id, parameters))
    candidates = [module for module in modules if type(module) in classes]
    training = [module for module in candidates if any(id(value) in trained for _, value in named_parameters(module))]
    for module in idle:
        if any(original(module) is other for other in training):
            warn_of(module)
            return True
    for module in idle:
        if any(_is_copy(other, original(module)) for other in training):
            _warn(module, _OTHER_TRAINS, _COPY)
            return True
    return False


def _is_copy(module: torch.nn.Module, original: torch.nn.Module) -> bool:
    """Whether ``module`` is of the class of ``original``, names the same parameters, and is not compiled."""
    names = [[name for name, _ in named_parameters(candidate)] for candidate in (module, original)]
    return type(module) is type(original) and names[0] == names[1] and _entry(module) is None


def warn_of(compiled: Any) -> None:
    """Warn of a module or function without a graph that ran, unless that is logged already."""
    _warn(compiled, _NO_GRAPH, _reason(compiled))


def _warn(compiled: Any, message: str, reason: str) -> None:
    own = original(compiled)
    if id(own) not in _warned or _warned[id(own)]() is not own:
        _warned[id(own)] = weakref.ref(own)
        log.warning(message, getattr(compiled, "__qualname__", None) or type(own).__name__, reason)


def _reason(compiled: torch.nn.Module) -> str:
    module = original(compiled)
    if config.disable:
        return "torch.compile is disabled (torch._dynamo.config.disable, TORCH_COMPILE_DISABLE)"
    if type(module).__module__.startswith("torch."):
        return (
            f"{type(module).__name__} is a class of torch, and Dynamo skips calls to those. Compile your own model "
            'before you wrap it; for a module of torch.nn, train what torch.compile(module, backend="fxamp") returns'
        )
    skipped = skipped_functions(compiled)
    if skipped:
        return "Dynamo skips " + "; ".join(skipped)
    ended = ended_functions(compiled)
    if ended:
        return "Dynamo ended its graph before the first op, and skips the functions called there: " + "; ".join(ended)
    if _entry(compiled) is not compiled and type(module).__call__ is not torch.nn.Module.__call__:
        return (
            f"{type(module).__name__} has a __call__ of its own, which need not run what .compile() made. Train what "
            'torch.compile(model, backend="fxamp", options=...) returns; if a library calls the model, compile the '
            "method that its __call__ runs: model.forward = torch.compile(model.forward, ...)"
        )
    return (
        "its forward was compiled but never called. Either another method was called (Lightning calls training_step: "
        "use fxamp.frameworks.lightning), or a copy (copy.deepcopy, EMA: compile the copy too), or the original module "
        "instead of what torch.compile returned. Or its first call was inside a TorchDispatchMode, such as "
        "FlopCounterMode: before torch 2.14, Dynamo skips it for good, unless torch._dynamo.reset() is called "
        "afterwards"
    )


def _entry(module: Any) -> Any:
    """Return the callable that torch.compile made of the module's forward, if any."""
    return module if isinstance(module, torch._dynamo.OptimizedModule) else vars(module).get("_compiled_call_impl")
