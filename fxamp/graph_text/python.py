"""Parse a graph's text, which is Python except for some values that torch prints."""

import ast
import re
import warnings

#: The printed form of an object that is not valid Python, ``<function f.<locals>.g at 0x7f>``.
_OBJECT = re.compile(r"(?<=[\s(\[{,=:])<[A-Za-z_](?:[^<>\n]|<[^<>\n]*>)*>")

#: A type annotation that older versions of torch print without quotes: ``f32[]``, ``f32[8][1]cuda:0``.
_TYPE = re.compile(r"(?<=: )[a-z]+[0-9]\w*\[[^\]\n\"]*\](?:\[[^\]\n\"]*\])?[\w:]*(?= =|[,);])")


def parse_quietly(text: str) -> ast.Module:
    """Call ``ast.parse`` without Python's warnings about the text; raises what that raises.

    Null bytes, which Python rejects even in comments, are replaced by spaces.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text.replace("\0", " "))


def class_of(text: str) -> ast.ClassDef:
    """Return the syntax tree of the one class in ``text``; raises SyntaxError as ``ast.parse`` does."""
    first, *more = parse_quietly(text).body
    if more or not isinstance(first, ast.ClassDef):
        raise SyntaxError("not one class", ("", more[0].lineno if more else 1, 0, ""))
    return first


def as_python(text: str) -> str:
    """Return ``text`` with everything that is not valid Python in quotes; line numbers do not change."""
    lines = text.split("\n")
    return "\n".join(line if line.lstrip().startswith("#") else _quoted(line) for line in lines)


def _quoted(line: str) -> str:
    return _TYPE.sub(lambda match: f'"{match[0]}"', _OBJECT.sub(lambda match: repr(match[0]), line))
