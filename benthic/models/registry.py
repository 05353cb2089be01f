"""Which family serves an architecture, and where a model's files are. No torch."""

from importlib import import_module
from pathlib import Path
from types import ModuleType

import benthic
from benthic.errors import UnknownModel, UnsupportedArchitecture

# architecture name of config.json -> module with the family's model; a new family adds one row
ARCHITECTURES = {"DeepseekV41ForCausalLM": "benthic.models.deepseek_v41"}

# model name -> folder inside the package
PACKAGED = {"minnow": "minnow"}


def model_dir(name: str | Path) -> Path:
    """The folder of a packaged model by name, or of a checkpoint by path. Raises UnknownModel."""
    if str(name) in PACKAGED:
        folder = Path(benthic.__file__).parent / PACKAGED[str(name)]
        if folder.is_dir():
            return folder
    path = Path(name).expanduser()
    if str(name) and path.is_dir():
        return path
    raise UnknownModel(str(name), [n for n, folder in PACKAGED.items() if _is_packaged(folder)])


def _is_packaged(folder: str) -> bool:
    return (Path(benthic.__file__).parent / folder).is_dir()


def family(architecture: str) -> ModuleType:
    """The module of an architecture, imported now. Raises UnsupportedArchitecture."""
    if architecture not in ARCHITECTURES:
        raise UnsupportedArchitecture(architecture, ARCHITECTURES)
    return import_module(ARCHITECTURES[architecture])
