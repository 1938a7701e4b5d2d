"""Reads a policy file and the files it extends, and puts them together."""

import re
import tomllib
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

from fxamp.errors import PolicyError, nearest
from fxamp.policy.builtin import built_in_names, find, folder, shown
from fxamp.policy.check import PolicyFile, check_file
from fxamp.policy.lines import index_lines
from fxamp.policy.model import Policy, Rule


def load_policy(name_or_path: "str | PathLike[str]") -> Policy:
    """Return the policy of a built-in name or a path ending in ``.toml``.

    The files it extends come first, in their order; what is said later wins, and a later rule with an earlier rule's id
    takes that one's place. Raises PolicyError, listing every mistake of all these files as ``file:line: message``.
    """
    path = find(name_or_path)
    merged = _Merge()
    merged.add(path, ())
    if not merged.mistakes:
        merged.check_complete(shown(path))
    if merged.mistakes:
        raise PolicyError("\n".join(merged.mistakes))
    return Policy(path.stem, **merged.fields, rules=tuple(merged.rules.values()), sources=tuple(merged.sources))


@dataclass
class _Merge:
    """The files read so far, put together; a dict keeps a replaced rule in its place."""

    fields: dict[str, str] = field(default_factory=dict)
    rules: dict[str, Rule] = field(default_factory=dict)
    sources: dict[str, None] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)

    def add(self, path: Path, chain: tuple[Path, ...]) -> None:
        """Read ``path``, first what it extends; ``chain`` is the files that led to it."""
        self.sources[str(path)] = None
        file = _read(path)
        reached_by = (*chain, path.resolve())
        for name, line in file.extends:
            self._extend(file, line, _extended(path, name), reached_by)
        self.fields |= file.fields
        self.rules |= {rule.id: rule for rule in file.rules}
        self.mistakes += [mistake for mistake in file.mistakes if mistake not in self.mistakes]

    def check_complete(self, name: str) -> None:
        """Note what the files together leave unsaid."""
        if "lower_precision_fp" not in self.fields:
            self.mistakes.append(
                f"{name}:1: lower_precision_fp is not set: this is an op table, not a policy; extend it in a file that "
                'says lower_precision_fp = "float16" or "bfloat16"'
            )
        if "device" not in self.fields:
            self.mistakes.append(f'{name}:1: [match] device is not set; write, say, [match] and device = "cuda"')

    def _extend(self, file: PolicyFile, line: int, path: Path, chain: tuple[Path, ...]) -> None:
        if path.resolve() in chain:
            circle = [*chain[chain.index(path.resolve()) :], path.resolve()]
            file.mistake(line, f"extends goes in a circle: {' -> '.join(each.name for each in circle)}")
        elif not path.is_file():
            file.mistake(line, f"extends {path.name!r}, but there is no file {shown(path)}{_suggest(path)}")
        else:
            self.add(path, chain)


def _read(path: Path) -> PolicyFile:
    """Parse and check one file; malformed TOML is its only mistake then."""
    try:
        text = path.read_text(encoding="utf-8")
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        file = PolicyFile(shown(path))
        file.mistake(_line_of(error, text), f"not TOML: {error}")
        return file
    except UnicodeDecodeError as error:
        raise PolicyError(f"{shown(path)}: not UTF-8 text: {error}") from error
    return check_file(shown(path), data, index_lines(text))


def _line_of(error: tomllib.TOMLDecodeError, text: str) -> int:
    match = re.search(r"at line (\d+)", str(error))
    return int(match[1]) if match else text.rstrip().count("\n") + 1


def _extended(path: Path, name: str) -> Path:
    """Return the file that ``extends`` means: beside the file that says it, else a built-in one."""
    beside = path.parent / name
    built_in = folder() / (name if name.endswith(".toml") else f"{name}.toml")
    return built_in if not beside.is_file() and built_in.is_file() else beside


def _suggest(path: Path) -> str:
    known = {each.name for base in (path.parent, folder()) for each in base.glob("*.toml")}
    return nearest(path.name, known | set(built_in_names()))
