"""Settings of a run: what stands in a batch, when a phase begins, and what is refused."""

from dataclasses import fields, replace

import pytest

from benthic.errors import BadSetting
from benthic.train.settings import Form, Phase, Run, Settings, phase_at, phases_from, rate_factor
from tests.train.small import SMALL, only_prose

FORMS = (Form(), Form(images=True), Form(True, True), Form(True, False))


def test_the_defaults_are_good() -> None:
    Settings().check()
    SMALL.check()
    only_prose(rows=1).check()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rows", 0),
        ("rows", 5),
        ("length", 31),
        ("length", 0),
        ("length", 1 << 16),
        ("parts", ""),
        ("parts", "needle=1"),
        ("parts", "needle=1,prose,prose"),
        ("parts", "needle=1,prose=2"),
        ("parts", "needle,prose"),
        ("parts", "needle=0,prose"),
        ("parts", "needle=1.5,prose"),
        ("parts", "needle=-1,prose"),
        ("parts", "needle=1,needle=1,prose"),
        ("parts", "needle=1,prose,shapes=1"),
        ("parts", "needle=x,prose"),
        ("shapes_rows", -1),
        ("long_length", 48),
        ("long_length", 32),
        ("long_length", 1 << 16),
        ("long_parts", "json=1"),
        ("long_parts", "prose=1"),
        ("long_parts", "needle=0"),
        ("weights", "json=1"),
        ("weights", "needle=-1"),
        ("weights", "needle=inf"),
        ("weights", "needle=nan"),
        ("weights", "needle"),
        ("index_rows", -1),
        ("index_rows", 3),
        ("index_rows", 8),
        ("seconds", 0.0),
        ("seconds", -1.0),
        ("seconds", float("inf")),
        ("seconds", float("nan")),
        ("images_from", -0.1),
        ("topk_from", 1.5),
        ("topk_from", -0.1),
        ("long_from", float("nan")),
        ("quantise_from", float("nan")),
        ("warm_up", -0.1),
        ("warm_up", 0.5),
        ("flat_until", 1.0),
        ("floor", -1.0),
        ("balance_weight", float("nan")),
        ("index_weight", float("inf")),
        ("bias_step", -1e-3),
        ("seed", -1),
    ],
)
def test_a_bad_setting_is_named(key: str, value: object) -> None:
    with pytest.raises(BadSetting) as caught:
        replace(SMALL, **{key: value}).check()
    assert caught.value.key == key
    assert caught.value.exit_code == 2
    assert f"setting {key} is " in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [{"parts": "needle=5,prose,copy=1"}, {"shapes_rows": 4}, {"long_parts": "needle=2"}],
    ids=["short", "pictures", "long"],
)
def test_there_is_always_a_row_of_prose(changes: dict[str, object]) -> None:
    with pytest.raises(BadSetting, match=r"setting rows is 6 .* want more than the \d of skills"):
        replace(SMALL, **changes).check()


def test_every_setting_is_checked() -> None:
    for field in fields(Settings):
        with pytest.raises(BadSetting):
            replace(SMALL, **{field.name: "?" if isinstance(field.default, str) else -5}).check()


@pytest.mark.parametrize("settings", [Settings(), SMALL], ids=["defaults", "small"])
def test_every_form_has_all_tokens_of_a_batch_and_long_rows_first(settings: Settings) -> None:
    for form in FORMS:
        runs = settings.layout(form)
        assert sum(run.rows * run.length for run in runs) == settings.rows * settings.length
        long = [run.length == settings.long_length for run in runs]
        assert long == sorted(long, reverse=True)
        assert any(long) == form.long
        assert (runs[-1].part == "shapes") == form.images
        assert {run.part for run in runs} == set(settings.names) - (set() if form.images else {"shapes"})


def test_the_defaults_give_skills_about_three_tenths() -> None:
    settings = Settings()
    shares = [1 - next(r.rows for r in settings.layout(form) if r.part == "prose") / 64 for form in FORMS[:3]]
    spans = (settings.images_from, settings.long_from - settings.images_from, 1 - settings.long_from)
    assert sum(a * b for a, b in zip(shares, spans, strict=True)) == pytest.approx(0.3, abs=0.04)
    for form in FORMS[:3]:  # the index loss sees needles and lists, and prose too
        seen, rows = {}, settings.index_rows
        for run in settings.layout(form):
            units = min(run.rows * run.length // settings.length, rows)
            seen[run.part] = units
            rows -= units
        assert seen["needle"] + seen["recall"] >= 7
        assert seen["prose"] >= 4


def test_a_layout_by_hand() -> None:
    runs = [Run("needle", 1, 32), Run("prose", 4, 32), Run("copy", 1, 32)]
    assert list(SMALL.layout(Form())) == runs
    assert list(SMALL.layout(Form(images=True))) == [
        runs[0], Run("prose", 3, 32), runs[2], Run("shapes", 1, 32)
    ]  # fmt: skip
    assert list(SMALL.layout(Form(True, True))) == [
        Run("needle", 1, 64), Run("prose", 2, 32), Run("copy", 1, 32), Run("shapes", 1, 32)
    ]  # fmt: skip


def test_weights_of_parts() -> None:
    assert [SMALL.weight(part) for part in ("needle", "prose", "copy", "shapes")] == [4, 1, 1, 2]


# The schedule


def test_phases_follow_the_time() -> None:
    want = {
        0.0: Phase(False, False),
        0.299: Phase(False, False),
        0.3: Phase(False, False, Form(images=True)),
        0.5: Phase(True, False, Form(images=True)),
        0.7: Phase(True, False, Form(True, True)),
        0.8: Phase(True, True, Form(True, True)),
        1.0: Phase(True, True, Form(True, True)),
    }
    for share, phase in want.items():
        assert phase_at(share, SMALL) == phase, share
    assert phase_at(0.0, replace(SMALL, topk_from=0.0)) == Phase(True, False)
    assert phase_at(1.0, replace(SMALL, long_from=1.0, images_from=1.0)) == Phase(True, True)


def test_phases_to_come() -> None:
    phases = list(dict.fromkeys(phase_at(share / 100, SMALL) for share in range(101)))
    assert phases_from(0.0, SMALL) == phases
    assert phases_from(0.3, SMALL) == phases_from(0.49, SMALL) == phases[1:]
    assert phases_from(0.75, SMALL) == phases[3:]
    assert phases_from(1.0, SMALL) == phases[-1:]
    swapped = replace(SMALL, topk_from=0.8, quantise_from=0.1, long_from=1.0)
    assert phases_from(0.0, swapped) == list(dict.fromkeys(phase_at(share / 100, swapped) for share in range(100)))


def test_rate_goes_up_stays_and_goes_down() -> None:
    settings = replace(SMALL, warm_up=0.04, flat_until=0.4, floor=0.03)
    want = {0.0: 0.01, 0.01: 0.25, 0.02: 0.5, 0.04: 1.0, 0.2: 1.0, 0.4: 1.0, 0.7: 0.515, 1.0: 0.03, 1.5: 0.03}
    for share, factor in want.items():
        assert rate_factor(share, settings) == pytest.approx(factor), share
    assert rate_factor(0.0, replace(settings, warm_up=0.0)) == 1.0
    down = [rate_factor(share / 100, settings) for share in range(40, 101)]
    assert down == sorted(down, reverse=True)
