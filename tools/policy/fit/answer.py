"""The answer as text: the policy file, and the table of policies beside it."""

import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tabulate import tabulate

from fxamp.policy import Policy, Rule
from fxamp.tools.common.formatting import size
from fxamp.tools.common.output import put, write_text
from fxamp.tools.common.progress import say
from fxamp.tools.policy.fit.chart import frontier_chart
from fxamp.tools.policy.fit.choice import Limits
from fxamp.tools.policy.fit.decisions import MARK, Option
from fxamp.tools.policy.fit.prices import Price
from fxamp.tools.policy.fit.search import Candidate, Search, summary
from fxamp.tools.policy.patch import reach, rules_text

_TITLES = ("", "memory", "peak", "kept", "est. ms", "time", "error", "")


@dataclass(frozen=True)
class Answer:
    """What the command prints. ``best``: the policy; ``notes``: what stands below the table."""

    options: Namespace
    search: Search
    best: Candidate | None
    limits: Limits
    notes: Sequence[str]

    @property
    def text(self) -> str:
        """The policy file, "" without a policy."""
        options = self.options
        if self.best is None:
            return ""
        return policy_text(self.best, options.policy, list(self._head(self.best)), self.search, options.output)

    def _head(self, best: Candidate) -> Iterator[str]:
        options, base = self.options, self.search.base
        limit = size(round(self.limits.memory))
        yield f"fxamp-policy fit: {Path(options.model).name} on one {options.gpu}, at most {limit}."
        yield f"A step takes {summary(best.price, base)} of {options.policy}, which takes {size(round(base.memory))}."

    @property
    def content(self) -> dict[str, Any]:
        """The answer as JSON's values."""
        return {
            "version": 1,
            "gpu": self.options.gpu,
            "memory": self.limits.memory,
            "error": self.limits.square**0.5,
            "answer": self.best.name if self.best is not None else None,
            "policies": [content(candidate) for candidate in self.search.candidates.values()],
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
        write_text(frontier_chart(title, answer.search, answer.best, answer.limits), options.chart)
    if options.json:
        put(json.dumps(answer.content, indent=2))
        return
    report = "\n\n".join([table(answer.search, answer.best, answer.limits), *answer.notes])
    if options.output is None and text:
        say(report)
        write_text(text)
    else:
        put(report)


def policy_text(candidate: Candidate, base: str, head: Sequence[str], search: Search, output: str | None) -> str:
    """Return the text of a policy file that extends ``base``, or the shipped policy that ``candidate`` is."""
    extended = base if candidate.options else candidate.name
    lines = [*(f"# {line}" for line in head), "", f"extends = [{reach(extended, output)}]"]
    state = next((option.optimizer for option in candidate.options if option.optimizer), None)
    if state is not None:
        form, why = state.content(), _why(candidate.options, search, lambda option: option.optimizer is state)
        lines += ["", f"# {why}", "[optimizer]", f'state = "{form["state"]}"', f'rounding = "{form["rounding"]}"']
    inherited = Policy.load(extended).rules
    rules = [rule for rule in candidate.policy.rules if rule not in inherited]
    return (
        "\n".join(lines) + "\n" + rules_text(candidate.policy, [_explained(rule, candidate, search) for rule in rules])
    )


def _explained(rule: Rule, candidate: Candidate, search: Search) -> Rule:
    name = rule.id.partition(MARK)[0]
    measured = _why(candidate.options, search, lambda option: any(own.id == name for own in option.rules))
    return replace(rule, why=f"{rule.why} {measured}".strip()) if measured else rule


def _why(options: Sequence[Option], search: Search, concerns: Callable[[Option], bool]) -> str:
    """Say what the options that ``concerns`` save and cost by themselves."""
    effects: dict[str, list[str]] = {}
    for decision, prices in zip(search.decisions, search.prices, strict=True):
        for option, price in zip(decision.options, prices, strict=True):
            if option in options and concerns(option):
                effects.setdefault(option.name, []).append(f"{decision.scope.name}: {effect(price, search.base)}")
    words = (f"{name}: {'; '.join(parts)}." for name, parts in effects.items())
    return f"Measured alone, {' '.join(words)}" if effects else ""


def effect(added: Price, base: Price) -> str:
    """Say what an option adds: bytes in use, the gradient's error and time, in shares of the base's."""
    more = round((base + added).memory - base.memory)
    memory = f"saves {size(-more)}" if more <= 0 else f"takes {size(more)}"
    error = (base + added).error / base.error - 1 if base.error else 0.0
    time = added.milliseconds / base.milliseconds if base.milliseconds else 0.0
    return f"{memory}, {100 * error:+.2f} % of error, {100 * time:+.2f} % of time"


def table(search: Search, best: Candidate | None, limits: Limits) -> str:
    """Return base, shipped policies, the best one and the frontier, all counted and measured; the fastest first."""
    frontier = search.frontier()
    base = search.base
    rows = []
    for candidate in sorted(search.candidates.values(), key=lambda one: one.price.milliseconds):
        if candidate.options and candidate is not best and candidate not in frontier:
            continue
        price = candidate.price
        notes = ["answer"] if candidate is best else []
        notes += limits.excesses(price)
        notes += [] if candidate in frontier else ["beaten"]
        rows.append(
            (
                candidate.name,
                *(size(round(bytes_)) for bytes_ in (price.memory, price.peak, price.kept)),
                f"{price.milliseconds:.4g}",
                f"{price.milliseconds / base.milliseconds:.3f}",
                f"{price.error / base.error:.3f}" if base.error else "-",
                ", ".join(notes),
            )
        )
    return tabulate(rows, headers=_TITLES, disable_numparse=True)


def content(candidate: Candidate) -> dict[str, Any]:
    """Return a candidate as JSON's values."""
    price = candidate.price
    return {
        "name": candidate.name,
        "memory": price.memory,
        "peak": price.peak,
        "kept": price.kept,
        "estimated_milliseconds": price.milliseconds,
        "gradient_error": price.error,
        "options": [{"scope": option.scope.name, "option": option.name} for option in candidate.options],
    }
