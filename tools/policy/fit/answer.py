"""The answer as text: the policy file, and the table of policies."""

import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from fxamp.policy import Policy
from fxamp.tools.common.formatting import size
from fxamp.tools.common.output import put, write_text
from fxamp.tools.common.progress import say
from fxamp.tools.policy.fit.candidate_costs import Price
from fxamp.tools.policy.fit.candidates import Candidate
from fxamp.tools.policy.fit.chart import frontier_chart
from fxamp.tools.policy.fit.choice import PricedPolicies
from fxamp.tools.policy.patch import reach, rules_text

_TITLES = ("policy", "memory", "peak", "kept", "est. ms", "time", "error", "")


@dataclass(frozen=True)
class Answer:
    """What the command prints. ``notes``: the lines below the table."""

    options: Namespace
    choice: PricedPolicies
    notes: Sequence[str]

    @property
    def text(self) -> str:
        """The policy file, "" without a policy."""
        if self.choice.best is None:
            return ""
        candidate, price = self.choice.best
        options, base = self.options, self.choice.base
        model, limit = Path(options.model).name, size(round(self.choice.limits.memory))
        head = [
            f"fxamp-policy fit: {model} on one {options.gpu}, at most {limit}.",
            f"A step takes {price.summary(base)} of {options.policy}, which takes {size(round(base.memory))}.",
        ]
        return policy_text(candidate, head, options.output)

    @property
    def content(self) -> dict[str, Any]:
        """The answer as JSON's values."""
        choice = self.choice
        return {
            "version": 2,
            "gpu": self.options.gpu,
            "memory": choice.limits.memory,
            "error": choice.limits.error,
            "answer": choice.best[0].name if choice.best is not None else None,
            "policies": [_content(*pair) for pair in choice.priced.values()],
            "policy": self.text,
            "notes": list(self.notes),
        }


def write_answer(answer: Answer) -> None:
    """Write the policy and the chart, and print the table or the JSON object."""
    options, text = answer.options, answer.text
    if options.output is not None and text:
        write_text(text, options.output)
    if options.chart is not None:
        title = f"{Path(options.model).stem} on one {options.gpu}"
        write_text(frontier_chart(title, answer.choice), options.chart)
    if options.json:
        put(json.dumps(answer.content, indent=2))
        return
    report = "\n\n".join([table(answer.choice), *answer.notes])
    if options.output is None and text:
        say(report)
        write_text(text)
    else:
        put(report)


def policy_text(candidate: Candidate, head: Sequence[str], output: str | None) -> str:
    """Return the text of a policy file that equals the candidate's policy; ``head``: the comment at its top."""
    inherited, policy = Policy.load(candidate.extends), candidate.policy
    lines = [*(f"# {line}" for line in head), "", f"extends = [{reach(candidate.extends, output)}]"]
    if policy.outputs != inherited.outputs:
        lines.append(f'outputs = "{policy.outputs}"')
    if (policy.capability, policy.arch) != (inherited.capability, inherited.arch):
        lines += ["", "[match]", f'capability = "{policy.capability}"']
        lines += [f"arch = {json.dumps(policy.arch)}"] if policy.arch else []
    if policy.optimizer is not None and policy.optimizer != inherited.optimizer:
        form = policy.optimizer.content()
        lines += ["", "[optimizer]", f'state = "{form["state"]}"', f'rounding = "{form["rounding"]}"']
    return "\n".join(lines) + "\n" + rules_text(policy, [rule for rule in policy.rules if rule not in inherited.rules])


def table(choice: PricedPolicies) -> str:
    """Return all candidates with their prices, the fastest first; time and error are over the base's."""
    base, frontier = choice.base, choice.frontier()
    best = None if choice.best is None else choice.best[0].name
    rows = []
    for name, (_, price) in sorted(choice.priced.items(), key=lambda item: item[1][1].milliseconds):
        notes = ["answer"] if name == best else []
        notes += choice.limits.excesses(price)
        notes += [] if name in frontier else ["beaten"]
        rows.append(
            (
                name,
                *(size(round(bytes_)) for bytes_ in (price.memory, price.peak, price.kept)),
                f"{price.milliseconds:.4g}",
                f"{price.milliseconds / base.milliseconds:.3f}",
                f"{price.error / base.error:.3f}" if base.error else "-",
                ", ".join(notes),
            )
        )
    return tabulate(rows, headers=_TITLES, disable_numparse=True)


def _content(candidate: Candidate, price: Price) -> dict[str, Any]:
    return {
        "name": candidate.name,
        "variants": list(candidate.variants),
        "memory": price.memory,
        "peak": price.peak,
        "kept": price.kept,
        "estimated_milliseconds": price.milliseconds,
        "gradient_error": price.error,
    }
