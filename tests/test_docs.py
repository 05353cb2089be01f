"""The pages hold together, and the README's examples run as they are written."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benthic.cli.main import VERBS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MINNOW = ROOT / "benthic" / "minnow"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    broken = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not broken


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = [page.name for page in (ROOT / "docs").glob("*.md") if page.name != "index.md"]
    assert [page for page in pages if f"({page})" not in index] == []


def test_the_tree_in_the_architecture_page_is_the_tree() -> None:
    """Every module is named there, and every file named there exists."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    tree = page.split("```")[1]
    named = set(re.findall(r"\b([a-z0-9_]+\.py)\b", tree))
    modules = {
        p.name for p in (ROOT / "benthic").rglob("*.py") if p.name != "__init__.py" and p.parent.name != "native"
    }
    modules |= {"__init__.py", "build.py", "generate.py"}
    verbs = {f"{verb}.py" for verb in VERBS}
    assert modules - named - verbs == set()
    assert named - modules == set()


def fenced(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_readme_names_real_make_targets_and_verbs() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for line in "".join(fenced("sh")).splitlines():
        words = shlex.split(line, comments=True)
        if words and words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), line
        elif words:
            assert words[0] == ".venv/bin/benthic", line
            assert words[1] in VERBS, line


@pytest.mark.skipif(not MINNOW.is_dir(), reason="the tree holds no packaged model")
def test_the_evaluation_example_runs() -> None:
    page = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    words = shlex.split(command)
    assert words[0] == "benthic"
    done = subprocess.run(
        [sys.executable, "-m", "benthic.cli.main", *words[1:]], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^copy +[01]", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.skipif(not MINNOW.is_dir(), reason="the tree holds no packaged model")
def test_the_readme_example_runs() -> None:
    (code,) = fenced("python")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 40
