"""The configuration: three spellings of a setting, their order, and what bad input says."""

import argparse
import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import pytest

from benthic import config
from benthic.config import CacheConfig, Config, SchedulerConfig, load
from benthic.errors import BadConfigFile, BadSetting, UnknownKey

KEYS = [setting.key for setting in config.settings()]


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "benthic.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_defaults_are_a_valid_configuration() -> None:
    assert load(environ={}) == Config()


def test_later_sources_win(write) -> None:
    file = write("seed = 1\n[scheduler]\ntoken_budget = 11\nmax_running = 12\n[cache]\nblocks = 13\n")
    environ = {"BENTHIC_SCHEDULER__TOKEN_BUDGET": "21", "BENTHIC_SCHEDULER__MAX_RUNNING": "22", "HOME": "/nowhere"}
    got = load(file, environ, {"scheduler.token_budget": "31"})
    assert (got.scheduler.token_budget, got.scheduler.max_running, got.cache.blocks, got.seed) == (31, 22, 13, 1)
    assert got.scheduler.max_context_tokens == SchedulerConfig().max_context_tokens


@pytest.mark.parametrize("setting", config.settings(), ids=KEYS)
def test_every_setting_has_three_spellings(setting: config.Setting, write) -> None:
    text = setting.choices[-1] if setting.choices else "x"
    most = setting.high or 1 << 20
    value = {str: text, int: int(most), float: most - 0.5, bool: not setting.default}[setting.kind]
    toml = write(f"{setting.key} = {str(value).lower() if setting.kind is bool else repr(value)}")
    parser = argparse.ArgumentParser()
    config.add_arguments(parser)
    flag = "--" + setting.key.replace("_", "-")
    variable = "BENTHIC_" + setting.key.upper().replace(".", "__")
    for got in (
        load(toml, {}),
        load(None, {variable: str(value)}),
        load(None, {}, {setting.key: str(value)}),
        load(None, {}, {setting.key: value}),
        config.from_arguments(parser.parse_args([flag, str(value)])),
        config.from_arguments(parser.parse_args(["--config", str(toml)])),
    ):
        for name in setting.key.split("."):
            got = getattr(got, name)
        assert got == value


def test_unknown_keys_name_the_nearest_known_one(write) -> None:
    with pytest.raises(UnknownKey, match=r"unknown setting cache\.blokcs .*did you mean cache\.blocks\?"):
        load(write("[cache]\nblokcs = 3\n"), {})
    with pytest.raises(UnknownKey, match=r"did you mean BENTHIC_CACHE__BLOCKS\?"):
        load(None, {"BENTHIC_CACHE__BLOKCS": "3"})
    with pytest.raises(UnknownKey, match=r"did you mean numerics\?"):
        load(None, {}, {"numeric": "reference"})
    with pytest.raises(UnknownKey, match="known keys: cache"):
        load(None, {}, {"zzz": 1})


@pytest.mark.parametrize(
    ("key", "value", "want"),
    [
        ("scheduler.token_budget", 0, "an integer from 1 to 1048576"),
        ("scheduler.token_budget", (1 << 20) + 1, "an integer from 1 to 1048576"),
        ("scheduler.token_budget", "many", "an integer from 1 to 1048576"),
        ("scheduler.token_budget", 2.0, "an integer"),
        ("scheduler.token_budget", True, "an integer"),
        ("scheduler.token_budget", None, "an integer"),
        ("cache.blocks", -1, "at least 0"),
        ("numerics", "exact", "one of reference, production, fast, float"),
        ("model", 3, "text"),
        ("seed", -1, "or none"),
        ("cpu", 3, "unknown"),
    ],
)
def test_bad_values_say_the_range(key: str, value: object, want: str) -> None:
    with pytest.raises((BadSetting, UnknownKey)) as caught:
        load(None, {}, {key: value})
    assert key in str(caught.value)
    assert want in str(caught.value)
    assert caught.value.exit_code == 2


def test_ranges_hold_for_objects_built_in_code() -> None:
    with pytest.raises(BadSetting, match=r"cache\.blocks is -5"):
        Config(cache=CacheConfig(blocks=-5))


def test_ends_of_a_range_are_allowed() -> None:
    assert load(None, {}, {"scheduler.token_budget": 1}).scheduler.token_budget == 1
    assert load(None, {}, {"scheduler.token_budget": 1 << 20}).scheduler.token_budget == 1 << 20


def test_not_a_number_is_outside_every_range() -> None:
    setting = config.Setting("x", float, False, 0.5, "", 0.0, 1.0, ())
    assert setting.check(1, "argument") == 1.0
    for value in (math.nan, math.inf, -0.1, "0.5"):
        with pytest.raises(BadSetting):
            setting.check(value, "argument")


def test_words_for_true_and_false() -> None:
    setting = config.Setting("x", bool, False, False, "", None, None, ())
    assert [setting.parse(word, "") for word in ("on", "TRUE", "1", "off", "false", "0")] == [True] * 3 + [False] * 3
    with pytest.raises(BadSetting, match="true or false"):
        setting.parse("yes please", "")


def test_none_unsets_an_optional_setting(write) -> None:
    assert load(write("seed = 7"), {"BENTHIC_SEED": "none"}).seed is None


@pytest.mark.parametrize("text", ["seed = ", "[cache\n", "seed = 1\nseed = 2"])
def test_a_broken_file_is_named(write, text: str) -> None:
    path = write(text)
    with pytest.raises(BadConfigFile, match=r"benthic\.toml"):
        load(path, {})


def test_a_missing_or_binary_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadConfigFile, match="absent"):
        load(tmp_path / "absent.toml", {})
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadConfigFile, match="binary"):
        load(tmp_path / "binary.toml", {})


def test_the_tree_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().cache.blocks = 3  # type: ignore[misc]


def test_a_command_may_keep_a_flag_for_itself() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int)
    config.add_arguments(parser, skip=["seed"])
    args = parser.parse_args(["--seed", "5", "--cache.blocks", "9"])
    got = config.from_arguments(args, device="cpu")
    assert (args.seed, got.seed, got.cache.blocks, got.device) == (5, None, 9, "cpu")


def test_a_command_without_settings_or_with_a_config_of_its_own_still_has_a_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BENTHIC_LOG_LEVEL", "debug")
    args = argparse.Namespace(config="a model's config.json")
    assert config.from_arguments(args).log_level == "debug"


def test_the_user_cache_folder_follows_the_desktop_convention(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert config.user_cache_dir() == tmp_path / "benthic"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert config.user_cache_dir() == Path("/home/someone/.cache/benthic")


def test_generated_pages_match_the_code() -> None:
    script = Path(__file__).parents[1] / "docs" / "generate.py"
    subprocess.run([sys.executable, str(script), "--check"], check=True)


def test_every_setting_is_on_the_page() -> None:
    page = config.markdown()
    assert all(f"`{key}`" in page for key in KEYS)
