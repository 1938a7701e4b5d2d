"""What is read without torch starts without it, and without all that it brings."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.programs.show_samples import gpt

from fxamp.graph_text.write import write_listing

ROOT = Path(__file__).parents[3]
MINE = 'extends = ["cuda-float16"]\noutputs = "keep"\n'
GRAPH = 'class G(torch.nn.Module):\n    def forward(self, x: "f32[4]"):\n        return (x,)\n'
PROGRAM = """
import sys
sys.modules.update(torch=None, numpy=None, triton=None)
from fxamp.tools.{}.command import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("line", "status"),
    [
        *((f"show dump.py {more}", 0) for more in ("", "--format json", "--format model-explorer", "--why linear")),
        ("show graph.txt", 0),
        *((f"diff cuda-float16 mine.toml --format {format}", 1) for format in ("text", "json", "markdown")),
        ("policy show mine.toml --torch 2.13", 0),
        ("policy explain mm --policy mine.toml --torch 2.13", 0),
        ("policy list", 0),
    ],
)
def test_it_starts_without_torch(line: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "dump.py").write_text(write_listing(gpt()))
    (tmp_path / "graph.txt").write_text(GRAPH)
    (tmp_path / "mine.toml").write_text(MINE)
    tool, *arguments = line.split()
    command = [sys.executable, "-c", PROGRAM.format(tool), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == status and done.stdout and "Traceback" not in done.stderr, done.stderr
