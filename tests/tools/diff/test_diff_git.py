"""``fxamp-diff --git`` as git calls it, in repositories made for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DRIVER = f"{sys.executable} -c 'import sys; from fxamp.tools.diff.command import main; sys.exit(main())' --git"

BASE = 'extends = ["cuda-float16.toml"]\n\n[[rule]]\nid = "head"\ncast = "fp32"\nmodules = ["lm_head"]\n'
TEAM = 'extends = ["base.toml"]\noutputs = "keep"\n'


class Repository:
    """A git repository whose ``*.toml`` files are compared by fxamp-diff."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
        self.environment = {**environment, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "GIT_CONFIG_NOSYSTEM": "1"}
        self.environment["GIT_CONFIG_GLOBAL"] = str(folder / "no-such-file")
        self.git("init", "-q")
        for key, value in {"user.name": "a", "user.email": "a@b", "diff.fxamp.command": DRIVER}.items():
            self.git("config", key, value)
        self.write(".gitattributes", "*.toml diff=fxamp\n")
        self.write("policies/base.toml", BASE)
        self.write("policies/team.toml", TEAM)
        self.commit()

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    def commit(self) -> None:
        self.git("add", "-A")
        self.git("commit", "-qm", "x")

    def git(self, *arguments: str, below: str = ".", **more: str) -> str:
        done = subprocess.run(
            ["git", *arguments],
            cwd=self.folder / below,
            env=self.environment | more,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_a_changed_policy_that_extends_a_file_beside_it(repository: Repository) -> None:
    repository.write("policies/team.toml", TEAM.replace("keep", "captured") + "# more\n")
    for below in (".", "policies"):
        assert repository.git("diff", below=below).splitlines() == [
            "fxamp-diff a/policies/team.toml b/policies/team.toml",
            "--- team (policies/team.toml), for cuda in float16",
            "+++ team (policies/team.toml), for cuda in float16",
            "",
            "~ outputs  keep -> captured",
            "",
            "they differ: 1 setting",
        ]


def test_what_decides_the_same(repository: Repository) -> None:
    repository.write("policies/team.toml", f"# Ours.\n{TEAM}")
    assert repository.git("diff").splitlines()[-1] == "the same: nothing is decided differently"


def test_new_removed_and_renamed_policies(repository: Repository) -> None:
    repository.write("policies/new.toml", BASE)
    (repository.folder / "policies/team.toml").unlink()
    repository.git("add", "-A")
    text = repository.git("diff", "--cached")
    new, gone = text.split("fxamp-diff a/policies/team.toml /dev/null\n")
    assert new.startswith("fxamp-diff /dev/null b/policies/new.toml\n--- /dev/null\n+++ new (policies/new.toml)")
    assert "~ device              not set -> cuda" in new
    assert "+ head " in new
    assert "- head " in gone
    repository.git("reset", "-q", "--hard")
    repository.git("mv", "policies/base.toml", "policies/root.toml")
    repository.write("policies/root.toml", BASE.replace("lm_head", "top"))
    repository.git("add", "-A")
    text = repository.git("diff", "--cached", "-M", "HEAD", "--", "policies/root.toml", "policies/base.toml")
    assert text.startswith("fxamp-diff a/policies/base.toml b/policies/root.toml\n")
    assert "~ head  modules: -lm_head +top" in text


def test_op_tables_and_lines(repository: Repository) -> None:
    table = '[[rule]]\nid = "a"\ncast = "fp32"\nops = ["mm"]\n'
    repository.write("policies/table.toml", table)
    repository.write("policies/wider.toml", f'extends = ["table.toml"]\n{table.replace("mm", "bmm")}')
    repository.commit()
    repository.write("policies/table.toml", table.replace("fp32", "lower_precision_fp"))
    repository.write("policies/wider.toml", f'extends = ["table.toml"]\n\n{table.replace("mm", "mv")}')
    first, second = repository.git("diff").split("fxamp-diff a/policies/wider.toml b/policies/wider.toml\n")
    assert "~ a  cast: fp32 -> lower_precision_fp  [table.toml:1]" in first
    assert "~ a  ops: -bmm +mv  [wider.toml:2 -> wider.toml:3]" in second
    assert "float16" not in first + second


def test_what_is_no_policy_is_compared_by_lines(repository: Repository) -> None:
    repository.write("policies/team.toml", TEAM + 'cast = "fp32"\n')
    repository.write("notes.md", "a\n")
    repository.commit()
    repository.write("policies/team.toml", TEAM)
    repository.write("notes.md", "b\n")
    assert repository.git("diff", "policies").splitlines() == [
        "fxamp-diff a/policies/team.toml b/policies/team.toml",
        "# team.toml:3: unknown key 'cast' in a policy file; accepted: extends, match, lower_precision_fp, unlisted, "
        "outputs, loss_scale, optimizer, rule",
        "--- a/policies/team.toml",
        "+++ b/policies/team.toml",
        "@@ -1,3 +1,2 @@",
        ' extends = ["base.toml"]',
        ' outputs = "keep"',
        '-cast = "fp32"',
    ]
    text = repository.git("diff", "notes.md", GIT_EXTERNAL_DIFF=DRIVER)
    assert text.splitlines()[-2:] == ["-a", "+b"]


def test_a_merge_that_conflicts(repository: Repository) -> None:
    repository.git("checkout", "-qb", "other")
    repository.write("policies/team.toml", TEAM.replace("keep", "captured"))
    repository.commit()
    repository.git("checkout", "-q", "-")
    repository.write("policies/team.toml", TEAM + 'unlisted = "fp32"\n')
    repository.commit()
    subprocess.run(["git", "merge", "other"], cwd=repository.folder, env=repository.environment, capture_output=True)
    assert "* unmerged: policies/team.toml" in repository.git("diff", "--cached").splitlines()
