"""The error tree: every class is complete, and its text holds what a caller needs."""

import inspect
import pickle

import pytest

from benthic import errors
from benthic.errors import BenthicError

CLASSES = [
    item
    for item in vars(errors).values()
    if inspect.isclass(item) and issubclass(item, BenthicError) and item is not BenthicError
]
LEAVES = [cls for cls in CLASSES if not cls.__subclasses__()]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_class_knows_code_status_and_retry(cls: type[BenthicError]) -> None:
    assert cls.__doc__
    assert cls.code
    assert cls.code == cls.code.lower()
    assert 400 <= cls.status <= 599
    assert cls.exit_code in (1, 2)
    if cls.retryable:
        assert cls.status in (429, 503), "a client only tries again on these"
    if issubclass(cls, errors.RequestError):
        assert 400 <= cls.status < 500
        assert cls.exit_code == 2


def test_codes_are_unique() -> None:
    codes = [cls.code for cls in CLASSES]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (errors.PromptTooLong(130, 100), ["130 tokens", "30 over", "limit of 100", "scheduler.max_context_tokens"]),
        (errors.BadField("top_p", 1.5, "a number in (0, 1]"), ["top_p", "1.5", "(0, 1]"]),
        (errors.TokenOutOfRange("prompt[3]", 4096, 4096), ["prompt[3]", "4096", "[0, 4095]"]),
        (errors.MissingTensor("layers.0.w", "bfloat16 [2, 3]"), ["layers.0.w", "bfloat16 [2, 3]"]),
        (errors.MissingTensor("a", "x", missing=5), ["4 more"]),
        (errors.WrongShape("w", (2, 3), (3, 2)), ["w", "[3, 2]", "[2, 3]"]),
        (errors.TruncatedFile("model.safetensors", 100, 60), ["100", "60", "model.safetensors"]),
        (errors.UnknownModel("minow", ["minnow"]), ["'minow'", "did you mean minnow?"]),
        (errors.UnknownModel("qqqq", []), ["'qqqq'", "packaged models: none"]),
        (errors.ShapeError("swiglu: gate", want="[T, I]", got=(3,)), ["swiglu: gate", "[T, I]", "(3,)"]),
        (errors.CapacityError("cache blocks", 9, 4, "cache.bytes"), ["9 cache blocks", "4", "cache.bytes"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BenthicError) else "",
)
def test_texts_hold_values_limits_and_remedies(error: BenthicError, parts: list[str]) -> None:
    for part in parts:
        assert part in str(error)


def test_nearest_is_none_when_nothing_is_close() -> None:
    assert errors.nearest("token_budgit", ["token_budget", "seed"]) == "token_budget"
    assert errors.nearest("xyz", ["token_budget", "seed"]) is None
    assert errors.nearest("xyz", []) is None


@pytest.mark.parametrize("error", [errors.PromptTooLong(5, 4), errors.BadField("n", 0, "1"), errors.EmptyPrompt()])
def test_errors_survive_a_process_boundary(error: BenthicError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
