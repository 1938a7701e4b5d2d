"""The tag that tells torch's compile caches everything that changes the code of a graph but is not in the graph.

torch keys its caches by a graph's code, its inputs and its own settings. fxamp also rewrites the backward, depending on
the policy, the scaler, and the modules of the forward's nodes. All of that goes into
``torch.compiler.config.cache_key_tag``, a part of every key.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from torch.compiler import config as compiler_config
from torch.fx import GraphModule

from fxamp.graph import all_nodes, module_classes, module_path
from fxamp.passes.shared.decision import decision
from fxamp.policy import Policy

#: Keys of ``node.meta`` that no generated code depends on: values, which the inputs determine, and origins.
_IRRELEVANT = frozenset(
    {
        *("val", "example_value", "tensor_meta", "unbacked_bindings", "fxamp", "fxamp_inserted", "fxamp_was"),
        *("nn_module_stack", "fwd_nn_module_stack", "source_fn_stack", "fwd_source_fn_stack", "torch_fn"),
        *("stack_trace", "from_node", "seq_nr", "original_aten", "grapharg", "tensor_dict", "creation_timestamp"),
    }
)


def cache_key(gm: GraphModule, policy: Policy | None, *settings: object) -> str:
    """Return the tag for the graph ``gm``, rewritten by ``policy``; ``settings``: what else its compilation reads.

    Without a policy nothing is cast, but fxamp's code still counts, because it changes Inductor's output too. Settings
    and node annotations count by their ``repr``. If that contains an address, the tag is unique to the process, and the
    graph is compiled again in every process.
    """
    digest = hashlib.sha256(source_digest().encode())
    if policy is not None:
        rules = [(rule.id, rule.why, str(rule.origin)) for rule in policy.rules]
        digest.update(repr((policy.digest, policy.name, rules, settings)).encode())
    digest.update(repr([_annotations(node) for node in all_nodes(gm)]).encode())
    return f"fxamp {digest.hexdigest()}"


@contextmanager
def keyed(tag: str) -> Iterator[None]:
    """Add ``tag`` to the keys of torch's caches inside."""
    own = compiler_config.cache_key_tag
    with compiler_config.patch(cache_key_tag=f"{own} {tag}"):  # type: ignore[attr-defined]
        yield


@cache
def source_digest(home: Path = Path(__file__).parents[1]) -> str:
    """Return the sha256 in hex of fxamp's code in the folder ``home``, version included, without the tools."""
    digest = hashlib.sha256()
    for file in _sources(home):
        digest.update(str(file.relative_to(home)).encode() + file.read_bytes())
    return digest.hexdigest()


def _sources(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name != "tools":
            yield from _sources(path)
        elif path.suffix == ".py":
            yield path


def _annotations(node: Any) -> tuple[object, ...]:
    decided = decision(node)
    summary = None if decided is None else (decided.rule and decided.rule.id, str(decided.lower), decided.overruled)
    rest = sorted((key, repr(value)) for key, value in node.meta.items() if key not in _IRRELEVANT)
    return module_path(node), module_classes(node), summary, rest
