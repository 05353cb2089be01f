"""What may load torch, at run time: the import contracts read the source, this reads sys.modules."""

import subprocess
import sys

import pytest

TORCH_FREE = [
    "benthic",
    "benthic.config",
    "benthic.errors",
    "benthic.host",
    "benthic.log",
    "benthic.metrics",
    "benthic.types",
    "benthic.skills.base",
    "benthic.skills.loops",
    "benthic.skills.shapes",
    "benthic.skills.structured",
    "benthic.skills.text",
    "benthic.text.tokenizer",
    "benthic.text.prompt",
    "benthic.text.reply",
    "benthic.cache.spec",
    "benthic.cache.blocks",
    "benthic.cache.manager",
    "benthic.engine.scheduler",
    "benthic.engine.branch",
    "benthic.engine.cost",
    "benthic.engine.first_steps",
    "benthic.engine.queue",
    "benthic.sim.run",
    "benthic.models.deepseek_v41_config",
    "benthic.models.registry",
    "benthic.cli.main",
]


def modules_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", TORCH_FREE)
def test_loads_no_torch(module: str) -> None:
    assert not {"torch", "triton"} & modules_after(f"import {module}")


def test_the_public_names_load_torch_only_when_used() -> None:
    loaded = modules_after("from benthic import SamplingParams, __version__")
    assert "torch" not in loaded
    assert "torch" in modules_after("from benthic import LLM")


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    import benthic

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        benthic.nothing  # noqa: B018


def test_help_starts_without_the_heavy_packages() -> None:
    statement = "from benthic.cli.main import main; import contextlib; "
    statement += "\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code = f"import sys\n{statement}\nprint('MODULES', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split("MODULES")[1].split())
    assert not {"torch", "numpy", "tokenizers", "prometheus_client", "deepseek_recipe"} & loaded
