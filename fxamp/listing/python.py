"""Syntax trees of a graph's text, which is meant to be Python but is not always."""

import ast
import re
import warnings

#: The representation of an object that Python cannot read back, ``<function f.<locals>.g at 0x7f>``.
_OBJECT = re.compile(r"(?<=[\s(\[{,=:])<[A-Za-z_](?:[^<>\n]|<[^<>\n]*>)*>")

#: The type of a value as older versions of torch print it, without quotes: ``f32[]``, ``f32[8][1]cuda:0``.
_TYPE = re.compile(r"(?<=: )[a-z]+[0-9]\w*\[[^\]\n\"]*\](?:\[[^\]\n\"]*\])?[\w:]*(?= =|[,);])")


def parse_quietly(text: str) -> ast.Module:
    """``ast.parse`` without Python's warnings about what it reads; raises what that raises.

    Null bytes, which Python refuses even in comments, are read as spaces.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text.replace("\0", " "))


def class_of(text: str) -> ast.ClassDef:
    """The syntax of the one class that ``text`` holds; raises SyntaxError as ``ast.parse`` does."""
    first, *more = parse_quietly(text).body
    if more or not isinstance(first, ast.ClassDef):
        raise SyntaxError("not one class", ("", more[0].lineno if more else 1, 0, ""))
    return first


def as_python(text: str) -> str:
    """``text`` with what torch prints but Python does not read in quotes; its lines stay the same lines."""
    lines = text.split("\n")
    return "\n".join(line if line.lstrip().startswith("#") else _quoted(line) for line in lines)


def _quoted(line: str) -> str:
    return _TYPE.sub(lambda match: f'"{match[0]}"', _OBJECT.sub(lambda match: repr(match[0]), line))
