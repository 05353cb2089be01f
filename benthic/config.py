"""The whole configuration: one tree of frozen dataclasses, and `load` from file, environment and command line.

A setting has three spellings, all from its path: `scheduler.token_budget` in TOML, `BENTHIC_SCHEDULER__TOKEN_BUDGET`
in the environment, `--scheduler.token-budget` on the command line. Later sources win: default, file, environment,
command line. This is the only module that reads the environment.
"""

import argparse
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, get_args, get_type_hints

from benthic.errors import BadConfigFile, BadSetting, UnknownKey
from benthic.types import MODES, NUMERICS, TRUNCATIONS

PREFIX = "BENTHIC_"


def opt(
    default: Any, doc: str, *, low: float | None = None, high: float | None = None, choices: Sequence[str] = ()
) -> Any:
    """One setting: its default, what it means with its unit, and its inclusive range or its allowed words."""
    return field(default=default, metadata={"doc": doc, "low": low, "high": high, "choices": tuple(choices)})


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_context_tokens: int = opt(0, "most tokens of prompt and completion together; 0: the model's own limit", low=0)
    token_budget: int = opt(1024, "most tokens in one step, over all requests", low=1, high=1 << 20)
    max_running: int = opt(32, "most requests that run at the same time, one state slot each", low=1, high=4096)
    itl_target_ms: float = opt(
        0.0,
        "while requests decode, rows of prompts make a step no longer than this, milliseconds; 0: see `itl_stretch`",
        low=0,
    )
    itl_stretch: float = opt(
        1.8,
        "without an `itl_target_ms`: while requests decode, rows of prompts make a step at most so many times as long "
        "as it is without them; 0: no limit but the token budget",
        low=0,
    )
    prefill_floor: int = opt(16, "rows of prompts that a step computes whatever its target is, tokens", low=1)
    prompt_slowdown: float = opt(
        5.0,
        "a prompt may take so many times what it takes alone, and 2 s more; while one takes longer, the target of a "
        "step grows in proportion, so that prompts do not pile up; 0: the target holds whatever waits",
        low=0,
    )
    patience_seconds: float = opt(
        30.0,
        "a request that waits moves up by one priority every so many seconds, and is due after so many if it has no "
        "earlier deadline; 0: priorities are strict, whoever waits",
        low=0,
    )
    ahead: str = opt(
        "auto",
        "a step is planned and begun while the one before it runs: `on`, `off`, or `auto`: on a GPU",
        choices=("auto", "on", "off"),
    )
    worst_first: bool = opt(
        True,
        "the largest steps that this configuration admits are taken before the engine is ready, so that memory that is "
        "not there is missed then and not later; on a CPU as large as about a second allows",
    )
    image_tokens: int = opt(
        131072,
        "most tokens of images, over all requests that are reading theirs; bounds the memory of their rows",
        low=1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    blocks: int = opt(0, "KV blocks of 128 tokens in the pool; 0: as many as `cache.bytes` holds", low=0)
    bytes: int = opt(
        64 << 20, "room for the pool of KV blocks, bytes; not used when `cache.blocks` is set", low=1 << 16
    )
    prefix: bool = opt(True, "what a prompt has in common with earlier ones is not computed again")
    mode: str = opt(
        "snapshot",
        "how a sequence goes on behind a cached prefix. `snapshot`: from a state that was kept there, else as `exact`; "
        "`exact`: computes so many tokens again that nothing differs from a cold start; `replay`: only one window of "
        "them, an approximation",
        choices=MODES,
    )
    snapshots: int = opt(
        32, "states kept at ends of cached blocks for mode `snapshot`, one slot each", low=0, high=65536
    )
    replay_rows: int = opt(0, "tokens that mode `replay` computes again; 0: one window", low=0)
    truncation: str = opt(
        "halo",
        "what the layers behind the last KV source skip of a prompt. `halo`: rows that the last one cannot see; `off`: "
        "nothing; `compact`: all but the last `kept_rows`, an approximation; `mask`: sees the same, skips nothing",
        choices=TRUNCATIONS,
    )
    kept_rows: int = opt(140, "rows that truncations `compact` and `mask` keep of a prompt, at least one window", low=1)
    eviction: str = opt("s3-fifo", "which idle blocks make room first", choices=("s3-fifo", "lru"))
    ttl_seconds: float = opt(
        0.0, "a block that is not hit for so long is not found any more, seconds; 0: no limit", low=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuConfig:
    threads: int = opt(0, "threads that compute one step; 0: one per core this process may use", low=0, high=1024)
    native: str = opt(
        "auto",
        "C kernels: `auto` uses them when a compiler is there, `on` refuses to start without, `off` runs plain torch",
        choices=("auto", "on", "off"),
    )
    compiler: str = opt("cc", "C compiler that builds the native kernels, a command or a path")
    cache_dir: str = opt("", "folder for compiled kernels; empty: `benthic` in the user's cache folder")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuConfig:
    graphs: bool = opt(True, "decode steps and small steps with prompts are CUDA graphs, captured at start")
    graph_rows: int = opt(2048, "rows of the largest step with prompts that is one; 0: none", low=0)
    engram_tables: str = opt(
        "device",
        "where n-gram tables lie: `device`, or `host`: pinned memory read over the link",
        choices=("device", "host"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    cache_dir: str = opt("", "folder where passed gates are kept; empty: `benthic/gate` in the user's cache folder")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    model: str = opt("minnow", "a packaged model's name, or a checkpoint folder")
    numerics: str = opt("reference", "how values are rounded: the profile's name", choices=tuple(NUMERICS))
    device: str = opt("cpu", "`cpu`, `cuda`, `cuda:N`, or `auto`: the first GPU when there is one, else the CPU")
    deterministic: bool = opt(
        False, "the bits of an answer do not depend on what else is computed, on chunks, or on what was cached"
    )
    seed: int | None = opt(
        None, "seed for requests that bring none; `none`: a new one each time", low=0, high=2**63 - 1
    )
    log_level: str = opt(
        "warning", "least severe events that are logged", choices=("debug", "info", "warning", "error")
    )
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    cpu: CpuConfig = field(default_factory=CpuConfig)
    gpu: GpuConfig = field(default_factory=GpuConfig)
    gate: GateConfig = field(default_factory=GateConfig)

    def __post_init__(self) -> None:
        for setting in settings():
            setting.check(_get(self, setting.key), "argument")


class Setting(NamedTuple):
    """One leaf of the tree."""

    key: str  # dotted path
    kind: type  # str, int, float or bool
    optional: bool  # None is allowed
    default: Any
    doc: str
    low: float | None
    high: float | None
    choices: tuple[str, ...]

    @property
    def variable(self) -> str:
        return PREFIX + self.key.upper().replace(".", "__")

    @property
    def flag(self) -> str:
        return "--" + self.key.replace("_", "-")

    @property
    def want(self) -> str:
        """What the setting takes, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        words = {str: "text", int: "an integer", float: "a number", bool: "true or false"}[self.kind]
        if self.low is not None and self.high is not None:
            words += f" from {self.low} to {self.high}"
        elif self.low is not None:
            words += f" of at least {self.low}"
        elif self.high is not None:
            words += f" of at most {self.high}"
        return words + (" or none" if self.optional else "")

    def check(self, value: object, source: str) -> Any:
        """The value in the setting's type. Raises BadSetting."""
        if value is None and self.optional:
            return value
        if self.kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, self.kind) or (self.kind is int and isinstance(value, bool)):
            raise BadSetting(self.key, value, self.want, source)
        if self.choices and value not in self.choices:
            raise BadSetting(self.key, value, self.want, source)
        if isinstance(value, int | float):
            # written so that a NaN fails too
            above = self.low is None or value >= self.low
            below = self.high is None or value <= self.high
            if not (above and below):
                raise BadSetting(self.key, value, self.want, source)
        return value

    def parse(self, text: str, source: str) -> Any:
        """A value written as text in the environment or on the command line. Raises BadSetting."""
        value: object = text
        if self.optional and text.lower() == "none":
            value = None
        elif self.kind is bool:
            value = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}.get(
                text.lower(), text
            )
        elif self.kind in (int, float):
            try:
                value = self.kind(text)
            except ValueError:
                value = text
        return self.check(value, source)


@cache
def settings() -> tuple[Setting, ...]:
    """Every setting of the tree, in the order of the page."""
    return tuple(_leaves(Config, ""))


def load(
    file: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Config:
    """Default, then file, then environment, then overrides.

    file       a TOML file; None: no file.
    environ    None: the process's environment. Names without the BENTHIC_ prefix are ignored.
    overrides  dotted key -> value; text is parsed, other values are taken as they are.
    Raises     UnknownKey, BadSetting, BadConfigFile.
    """
    values: dict[str, Any] = {}
    if file is not None:
        values |= {key: _find(key, str(file)).check(value, str(file)) for key, value in _read(Path(file))}
    names = {setting.variable: setting for setting in settings()}
    for name, text in (os.environ if environ is None else environ).items():
        if name.startswith(PREFIX):
            if name not in names:
                raise UnknownKey(name, "environment", names)
            values[names[name].key] = names[name].parse(text, f"environment variable {name}")
    for key, value in (overrides or {}).items():
        setting = _find(key, "argument")
        values[key] = setting.parse(value, "argument") if isinstance(value, str) else setting.check(value, "argument")
    return _build(Config, values, "")


def add_arguments(parser: argparse.ArgumentParser, skip: Sequence[str] = ()) -> None:
    """Give a command every setting as a flag, and `--config FILE`.

    skip  keys whose flag the command uses for something of its own, such as the seed of its one request.
    """
    group = parser.add_argument_group("configuration", "docs/configuration.md explains each setting")
    group.add_argument("--config", dest=_FILE, metavar="FILE", help="TOML file with settings")
    for setting in settings():
        if setting.key not in skip:
            text = f"{setting.doc} (default {setting.default!r})".replace("%", "%%").replace("`", "")
            group.add_argument(setting.flag, dest=_DEST + setting.key, metavar="VALUE", default=None, help=text)


def from_arguments(args: argparse.Namespace, **overrides: object) -> Config:
    """The configuration a command runs with: `load`, with the flags that `add_arguments` made, if it did.

    overrides  top-level keys the command decides itself; they win over the flags.
    """
    flags = {key.removeprefix(_DEST): value for key, value in vars(args).items() if key.startswith(_DEST)}
    given = {key: value for key, value in flags.items() if value is not None}
    return load(getattr(args, _FILE, None), overrides={**given, **overrides})


def secret(variable: str) -> str:
    """The value of an environment variable that a flag names, such as a server's key. Raises BadSetting."""
    value = os.environ.get(variable, "")
    if not value:
        raise BadSetting(variable, value, "a value in the environment", "environment")
    return value


def user_cache_dir() -> Path:
    """The folder for files that can be made again: `benthic` in the user's cache folder. It may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "benthic"


def markdown() -> str:
    """The page docs/configuration.md."""
    lines = [
        "# Configuration",
        "",
        "<!-- generated from benthic/config.py by `make docs`; edit there -->",
        "",
        "A setting has three spellings: its key in a TOML file given with `--config`, an environment variable, and a",
        "flag. Later ones win: default, file, environment, flag. An unknown key is an error that names the nearest",
        "known one; a value outside its range is an error that states the range.",
        "",
        "```toml",
        "# benthic.toml",
        'model = "minnow"',
        "[scheduler]",
        "token_budget = 512",
        "```",
        "",
        "The same: `BENTHIC_SCHEDULER__TOKEN_BUDGET=512` and `--scheduler.token-budget 512`.",
        "",
        "| key | default | takes | meaning |",
        "| --- | --- | --- | --- |",
    ]
    for setting in settings():
        shown = "none" if setting.default is None else str(setting.default) or '""'
        lines.append(f"| `{setting.key}` | `{shown}` | {setting.want} | {setting.doc} |")
    return "\n".join(lines) + "\n"


_DEST, _FILE = "setting:", "settings file"  # names in the namespace that no command uses for something of its own


def _leaves(tree: type, prefix: str) -> Iterator[Setting]:
    hints = get_type_hints(tree)
    for item in fields(tree):
        hint, key = hints[item.name], prefix + item.name
        if is_dataclass(hint):
            yield from _leaves(hint, key + ".")  # type: ignore[arg-type]
            continue
        kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        kind = next(k for k in kinds if k is not type(None))
        yield Setting(key=key, kind=kind, optional=type(None) in kinds, default=item.default, **item.metadata)


def _find(key: str, source: str) -> Setting:
    for setting in settings():
        if setting.key == key:
            return setting
    raise UnknownKey(key, source, (setting.key for setting in settings()))


def _get(config: object, key: str) -> object:
    for name in key.split("."):
        config = getattr(config, name)
    return config


def _read(path: Path) -> Iterator[tuple[str, object]]:
    """(dotted key, value) of a TOML file."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadConfigFile(path, str(error)) from error
    yield from _flatten(tree, "")


def _flatten(tree: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            yield prefix + name, value


def _build(tree: type, values: Mapping[str, object], prefix: str) -> Any:
    hints = get_type_hints(tree)
    given: dict[str, Any] = {}
    for item in fields(tree):
        key = prefix + item.name
        if is_dataclass(hints[item.name]):
            given[item.name] = _build(hints[item.name], values, key + ".")
        elif key in values:
            given[item.name] = values[key]
    return tree(**given)
