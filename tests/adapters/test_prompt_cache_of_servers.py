"""`PromptCache` behind mlx-openai-server: its scheduler, a tiny model, beside its own cache."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("app") is None or importlib.util.find_spec("app.core.batch_scheduler") is None,
    reason="needs mlx-openai-server",
)


def test_mlx_openai_server_answers_the_same_finds_as_much_and_holds_fewer_bytes():
    command = [sys.executable, str(ROOT / "examples" / "prompt_cache_openai_server.py")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-4000:]
    rows = re.findall(r"^(\w+): found (.*), (\d+) bytes, (.*)$", ended.stdout, re.MULTILINE)
    (own, own_found, own_nbytes, own_answers), (ours, found, nbytes, answers) = rows
    assert (own, ours) == ("LRUPromptCache", "Prompts") and answers == own_answers
    assert ast.literal_eval(found) == ast.literal_eval(own_found) == [0, 418, 418]
    assert 0 < int(nbytes) < int(own_nbytes) / 2
