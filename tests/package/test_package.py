"""The package as it is built, installed and imported."""

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

from fxamp.backend import fxamp as fxamp_backend

ROOT = Path(__file__).parents[2]
FOLDERS = ("passes", "policies", "tools")


def python(*arguments: str, cwd: Path = ROOT, path: Path | None = None, interpreter: str = sys.executable) -> str:
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(path)} if path else dict(os.environ)
    if interpreter != sys.executable:
        environment.pop("PYTHONPATH", None)
    done = subprocess.run([interpreter, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_else_lies_at_the_top() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = {path.partition("/")[0] for path in listed.stdout.splitlines()}
    files = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"}
    assert {name for name in names if not name.startswith(".")} <= {"fxamp", "tests", *FOLDERS, *files}


@pytest.mark.parametrize("name", [*(f"fxamp/{name}" for name in FOLDERS), ".src/fxamp"])
def test_each_link_leads_to_a_top_level_folder(name: str) -> None:
    link = ROOT / name
    assert link.is_symlink() and link.resolve() == ROOT / link.name
    assert not Path(link.readlink()).is_absolute()


def environment_of(folder: Path) -> str:
    """Make an environment with what is installed here, except for fxamp if it is editable; return its interpreter."""
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    site.joinpath("here.pth").write_text("\n".join(entry for entry in sys.path if "site-packages" in entry))
    return str(folder / "bin/python")


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["editable", "sdist"])
@pytest.mark.parametrize("name", ["fxamp", "clone"])
def test_a_program_beside_the_clone_imports_the_package(form: str, name: str, tmp_path: Path) -> None:
    """As after `git clone URL && pip install -e ./fxamp`; and what is called `tools` stays the program's."""
    clone, interpreter = tmp_path / name, environment_of(tmp_path / "environment")
    unneeded = shutil.ignore_patterns(".[!s]*", "__pycache__", "*.egg-info", "build", "tests")
    shutil.copytree(ROOT, clone, symlinks=True, ignore=unneeded)
    source = ["-e", str(clone)]
    if form != "editable":
        python("-m", "build", f"--{form}", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(clone))
        source = list(map(str, (tmp_path / "dist").iterdir()))
    python("-m", "pip", "--python", interpreter, "install", "--no-deps", "--no-build-isolation", *source)

    (tmp_path / "train.py").write_text(
        "import fxamp, importlib.util as u\n"
        f"print(fxamp.__file__, fxamp.GradScaler.__name__, *filter(u.find_spec, {(*FOLDERS, 'tests')}))\n"
    )
    file, *names = python("train.py", cwd=tmp_path, interpreter=interpreter).split()
    assert names == ["GradScaler"]
    assert Path(os.path.realpath(file)).is_relative_to(clone if form == "editable" else tmp_path / "environment")
    assert python("-m", "fxamp", cwd=tmp_path, interpreter=interpreter).startswith("fxamp 0.1.0")


def test_the_wheel_holds_everything_and_imports_alone(tmp_path: Path) -> None:
    python("-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT))
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(site)
    expected = {f"fxamp/{path.relative_to(ROOT / 'fxamp')}" for path in (ROOT / "fxamp").rglob("*.py")}
    expected |= {
        f"fxamp/{folder}/{p.relative_to(ROOT / folder)}" for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")
    }
    expected |= {f"fxamp/policies/{path.name}" for path in (ROOT / "policies").glob("*.toml")}
    pages = (ROOT / "tools/show/page").iterdir()
    expected |= {f"fxamp/tools/show/page/{path.name}" for path in pages if path.is_file()}
    expected |= {
        "fxamp/py.typed",
        *(f"fxamp/policies/{page}.md" for page in ("README", "SHIPPED", "BEYOND_CASTS")),
        "fxamp/policies/schema.json",
    }
    expected |= {"fxamp/tools/show/README.md", "fxamp/tools/show/schema.json"}
    expected |= {"fxamp/tools/bench/cost/README.md", "fxamp/tools/bench/cost/hooks.cpp"}
    assert expected <= names
    assert not any(name.split("/")[0] in FOLDERS for name in names)
    script = "import fxamp; print(fxamp.__file__, fxamp.Policy.load('cuda-float16').name)"
    assert python("-c", script, cwd=tmp_path, path=site).split() == [str(site / "fxamp/__init__.py"), "cuda-float16"]


def test_importing_fxamp_and_reading_policies_starts_neither_torch_nor_triton() -> None:
    script = "import sys, fxamp; fxamp.Policy.load('cpu-bfloat16').resolve('cpu'); print(*sys.modules)"
    assert not {"torch", "triton", "numpy"} & {*python("-c", script).split()}


def test_the_adapters_for_frameworks_are_there_with_the_package() -> None:
    script = "import sys, fxamp; fxamp.frameworks; print(*sys.modules)"
    printed = {*python("-c", script).split()}
    assert "fxamp.frameworks" in printed and not {"torch", "transformers"} & printed


def test_every_public_name_is_there_and_explained() -> None:
    import fxamp

    for name in fxamp.__all__:
        assert getattr(fxamp, name) is not None
        assert re.search(rf"``{name}\b", fxamp.__doc__ or "")
    with pytest.raises(AttributeError, match="no attribute 'rewrit'"):
        fxamp.rewrit  # noqa: B018


def test_the_backend_is_known_to_torch_without_an_import() -> None:
    """By an entry point alone: nothing in fxamp registers it."""
    (entry,) = entry_points(group="torch_dynamo_backends", name="fxamp")
    assert entry.load() is fxamp_backend
    assert "fxamp" in torch._dynamo.list_backends()


def test_nothing_imports_the_second_copy() -> None:
    files = [path for folder in ("fxamp", *FOLDERS, "tests") for path in (ROOT / folder).rglob("*.py")]
    for path in files:
        for line in path.read_text(encoding="utf-8").splitlines():
            words = line.split()
            if words[:1] == ["import"] or (words[:1] == ["from"] and "import" in words):
                assert words[1].split(".")[0] not in FOLDERS, f"{path}: {line}"
