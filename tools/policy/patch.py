"""Write a policy patch: a file that extends a policy with rules, each with its evidence."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from fxamp.policy import LossScale, Policy, Rule


def patch_text(
    base: str, policy: Policy, rules: Sequence[Rule], head: Iterable[str], init_scale: float | None, output: str | None
) -> str:
    """Return the text of a policy file that extends ``base``, a built-in name or a path, with ``rules``.

    ``policy`` is the loaded ``base``, ``head`` the lines of the comment at the top, ``init_scale`` the initial loss
    scale, None to leave it out. The file will be written to ``output``, or to the working directory.
    """
    lines = [f"# {line}" if line else "#" for line in head]
    lines += ["", f"extends = [{_quoted(_reach(base, output))}]"]
    if init_scale is not None:
        lines += ["", "[loss_scale]", f"init_scale = {init_scale!r}"]
        lines += _bounds(policy.loss_scale, init_scale)
    return "\n".join(lines) + "\n" + _rules_text(policy, rules)


def _rules_text(policy: Policy, rules: Sequence[Rule]) -> str:
    if not rules:
        return ""
    whole = replace(policy, rules=tuple(replace(rule, origin=None) for rule in rules), loss_scale=None).dumps()
    return "\n" + whole[whole.index("[[rule]]") :]


def _bounds(base: LossScale | None, init_scale: float) -> list[str]:
    """Return the inherited bounds that the new scale would violate, set to the new scale."""
    found = []
    if base is not None and base.min_scale is not None and base.min_scale > init_scale:
        found.append(f"min_scale = {init_scale!r}")
    if base is not None and base.max_scale is not None and base.max_scale < init_scale:
        found.append(f"max_scale = {init_scale!r}")
    return found


def _reach(base: str, output: str | None) -> str:
    """Return ``base`` as written in the file: a name unchanged; a path relative to the file, or absolute."""
    if not base.endswith(".toml"):
        return base
    path, folder = Path(base).resolve(), Path(output or "patch.toml").resolve().parent
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.as_posix()


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
