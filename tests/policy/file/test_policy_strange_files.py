"""Policy files from strangers: each is refused by name, with its file, and no file costs more than its size."""

import os
from pathlib import Path

import pytest

from fxamp.errors import PolicyError
from fxamp.policy import Policy
from fxamp.policy.file import lines
from fxamp.policy.file.load import DEEPEST
from fxamp.policy.file.parse import LARGEST
from fxamp.policy.model.module_globs import covers_module

BASE = 'extends = ["cpu-bfloat16"]\n'

#: More than any recursion limit that a library has set meanwhile.
DEEP = 20_000

TEXTS = {
    "nested lists": (BASE + "x = " + "[" * DEEP + "]" * DEEP, 1, "nested too deeply"),
    "nested tables": (BASE + "x = " + "{a=" * DEEP + "1" + "}" * DEEP, 1, "nested too deeply"),
    "a null byte": ('extends = ["a\\u0000b"]', 1, r"there is no file '.*a\\x00b'"),
    "a null byte in a folder": ('extends = ["a\\u0000/b.toml"]', 1, "there is no file"),
    "a long name": ('extends = ["' + "a" * 5000 + '"]', 1, "there is no file"),
    "a long folder": ('extends = ["' + "a" * 5000 + '/b.toml"]', 1, "there is no file"),
    "a folder": ('extends = ["."]', 1, "there is no file"),
    "a device": ('extends = ["/dev/zero"]', 1, "there is no file"),
    "an escape sequence": ('extends = ["\\u001b[31mno"]', 1, r"there is no file '.*\\x1b\[31mno'"),
    "a number of 5000 digits": (BASE + "[loss_scale]\ninit_scale = " + "9" * 5000, 3, "5000 digits"),
    "a number of 400 digits": (BASE + "[loss_scale]\ninit_scale = " + "9" * 400, 3, "init_scale is too large"),
    "a number of 8000 hexadecimal digits": (BASE + "x = 0x" + "f" * 8000, 2, "x is too large a number"),
    "a large number in a rule": (
        BASE + '[[rule]]\nid = "a"\ncast = "fp32"\nargs = { dim = [1, 9223372036854775808] }',
        5,
        "too large a number; accepted: numbers of 64 bits",
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_strange_text_is_refused_with_its_line(name: str, tmp_path: Path) -> None:
    text, line, message = TEXTS[name]
    file = tmp_path / "strange.toml"
    file.write_text(text)
    with pytest.raises(PolicyError, match=rf"strange\.toml:{line}: .*{message}") as caught:
        Policy.load(file)
    assert "\x1b" not in str(caught.value)


BYTES = {
    "binary": bytes(range(256)),
    "latin-1": "# é".encode("latin-1"),
    "utf-16": BASE.encode("utf-16"),
    "empty": b"",
    "byte order mark": b"\xef\xbb\xbf" + BASE.encode(),
    "huge": BASE.encode() + b"#" * LARGEST,
}


@pytest.mark.parametrize("name", BYTES)
def test_strange_bytes_are_refused_by_name(name: str, tmp_path: Path) -> None:
    file = tmp_path / "strange.toml"
    file.write_bytes(BYTES[name])
    with pytest.raises(PolicyError, match=r"strange\.toml"):
        Policy.load(file)


def test_what_is_no_file_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.toml").mkdir()
    Path("one.toml").symlink_to("two.toml")
    Path("two.toml").symlink_to("one.toml")
    os.mkfifo("pipe.toml")
    for name in ("folder.toml", "one.toml", "pipe.toml", "\0.toml", "x" * 5000 + ".toml", "/dev/null/x.toml", ""):
        with pytest.raises(PolicyError, match=r"there is no policy file|no policy is named"):
            Policy.load(name)


def test_an_unreadable_file_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret.toml"
    file.write_text(BASE)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # root may read everything
    with pytest.raises(PolicyError, match=r"secret\.toml: Permission denied"):
        Policy.load(file)


def test_a_chain_of_files_is_as_long_as_it_may_be(tmp_path: Path) -> None:
    for at in range(DEEPEST + 1):
        (tmp_path / f"c{at}.toml").write_text(f'extends = ["c{at + 1}.toml"]\n')
    (tmp_path / f"c{DEEPEST - 1}.toml").write_text(BASE.replace("cpu-bfloat16", "last.toml"))
    (tmp_path / "last.toml").write_text('lower_precision_fp = "bfloat16"\n[match]\ndevice = "cpu"\n')
    with pytest.raises(PolicyError, match=f"is file {DEEPEST + 1} of a chain of extends; accepted: at most {DEEPEST}"):
        Policy.load(tmp_path / "c0.toml")
    assert Policy.load(tmp_path / "c1.toml").device == "cpu"


class _Counted(str):
    """A text that counts the characters in which lines are counted."""

    looked_at = 0

    def count(self, sub: str, start: int = 0, end: int | None = None) -> int:  # type: ignore[override]
        _Counted.looked_at += (len(self) if end is None else end) - start
        return super().count(sub, start, len(self) if end is None else end)


@pytest.mark.parametrize("rules", [10, 1000])
def test_lines_are_looked_up_in_work_that_grows_with_the_text(rules: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f'[[rule]]\nid = "a{at}"\nops = ["exp"]\n' for at in range(rules))
    steps = 0

    def bisect_left(ends: list[int], position: int) -> int:
        nonlocal steps
        steps += 1
        return next(at for at, end in enumerate([*ends, position]) if end >= position)

    monkeypatch.setattr(lines, "bisect_left", bisect_left)
    _Counted.looked_at = 0
    index = lines.index_lines(_Counted(text))
    assert _Counted.looked_at == 0 and steps == 5 * rules  # no text is counted; one look-up a path
    assert index.line(("rule", rules - 1, "ops", 0)) == 3 * rules


def test_a_glob_of_many_stars_takes_steps_by_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from fxamp.policy.model import module_globs

    compared = 0

    def match(name: str, glob: str) -> bool:
        nonlocal compared
        compared += 1
        return name == glob

    monkeypatch.setattr(module_globs, "fnmatchcase", match)
    glob, path = ".".join(["**", "a"] * 12 + ["b"]), ".".join(["a"] * 40)
    assert not covers_module(glob, path)
    assert compared <= len(glob.split(".")) * len(path.split("."))
