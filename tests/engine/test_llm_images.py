"""Conversations with images through `LLM.chat`: what comes of them, what they count, and what is refused in time."""

import io
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benthic import SamplingParams
from benthic.engine.llm import LLM
from benthic.engine.runner import Runner
from benthic.errors import (
    BadConfigKey,
    BadImage,
    BadMessages,
    CapacityError,
    ImageNotFetched,
    ImageTooLarge,
    NoVision,
    PromptTooLong,
    TooManyImages,
)
from benthic.testing.checkpoints import make_tiny
from benthic.testing.tokenizers import write_tokenizer
from benthic.text.images import data_url
from benthic.text.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=4, logprobs=0)


def write(path: Path, scratch: Path, **overrides: Any) -> Path:
    write_tokenizer(scratch, 4096)
    classes = int(Tokenizer.from_dir(scratch).engram_classes().max()) + 1
    make_tiny(path, engram_compressed_vocab_size=classes, **overrides)
    write_tokenizer(path, 4096)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model") / "tiny", tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    settings: dict[str, Any] = {
        "numerics": "float",
        "cpu__threads": 1,
        "cache__blocks": 20,
        "scheduler__max_context_tokens": 300,
        "scheduler__token_budget": 32,
        "scheduler__image_tokens": 130,
    }
    with LLM(folder, **settings) as llm:
        yield llm


@pytest.fixture(autouse=True)
def _nothing_stays(llm: LLM) -> Iterator[None]:
    yield
    llm.loop.scheduler.check_invariants()
    assert isinstance(llm.loop.runner, Runner)
    assert llm.loop.runner.image_tokens == 0
    assert not llm.loop.scheduler.unfinished
    assert not llm._sessions


def png(colour: str, size: tuple[int, int] = (84, 84)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, "PNG")
    return out.getvalue()


def user(*parts: str | bytes) -> dict[str, Any]:
    return {"role": "user", "content": [part(p) for p in parts]}


def part(p: str | bytes) -> dict[str, Any]:
    if isinstance(p, bytes):
        return {"type": "image_url", "image_url": {"url": data_url(p)}}
    return {"type": "text", "text": p}


RED, BLUE, LARGE = png("red"), png("blue"), png("green", (300, 200))


def test_a_picture_is_part_of_the_prompt(llm: LLM):
    done = llm.chat([user(RED, "What is it?")], GREEDY)
    prompt = llm.encoder.encode([user(RED, "What is it?")], spans=llm.model.image_tokens)
    assert done.prompt_token_ids == prompt.ids
    assert prompt.images[0].tokens == 8
    assert done.usage.prompt_tokens == len(prompt.ids)
    assert done.message is not None
    other = llm.chat([user(BLUE, "What is it?")], GREEDY)
    assert other.prompt_token_ids == done.prompt_token_ids
    assert [x.logprob for x in other.logprobs] != [x.logprob for x in done.logprobs]


def test_a_stream_and_two_pictures(llm: LLM):
    messages = [user("One:", RED, "two:", LARGE, "same?")]
    done = llm.chat(messages, GREEDY)
    assert len(done.prompt_token_ids) > 32, "more than one chunk"
    pieces = list(llm.chat(messages, GREEDY, stream=True))
    assert tuple(token for piece in pieces for token in piece.token_ids) == done.token_ids
    swapped = llm.chat([user("One:", LARGE, "two:", RED, "same?")], GREEDY)
    assert [x.logprob for x in swapped.logprobs] != [x.logprob for x in done.logprobs]


def test_a_picture_in_an_earlier_turn(llm: LLM):
    later = [{"role": "assistant", "content": "A box."}, {"role": "user", "content": "Which colour?"}]
    red, blue = (llm.chat([user(p, "What is it?"), *later], GREEDY) for p in (RED, BLUE))
    assert red.prompt_token_ids == blue.prompt_token_ids
    assert [x.logprob for x in red.logprobs] != [x.logprob for x in blue.logprobs]


def test_the_same_picture_twice_is_decoded_once(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    read, calls = llm.model.read_image, []
    monkeypatch.setattr(llm.model, "read_image", lambda *a: calls.append(a) or read(*a))
    llm.chat([user(RED, "and", RED, "and", BLUE)], GREEDY)
    assert [where for _, _, where in calls] == ["messages[0], image 1", "messages[0], image 3"]


def test_low_detail_is_another_picture(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """600 pixels wide or 512: the same span here, other rows."""
    noise = io.BytesIO()
    Image.effect_noise((600, 300), 90).save(noise, "PNG")
    message = user(noise.getvalue(), "?")
    low = user(noise.getvalue(), "?")
    low["content"][0]["image_url"]["detail"] = "low"
    whole, small = llm.chat([message], GREEDY), llm.chat([low], GREEDY)
    assert whole.prompt_token_ids == small.prompt_token_ids
    assert [x.logprob for x in whole.logprobs] != [x.logprob for x in small.logprobs]
    read, calls = llm.model.read_image, []
    monkeypatch.setattr(llm.model, "read_image", lambda *a: calls.append(a[1]) or read(*a))
    llm.chat([{"role": "user", "content": [message["content"][0], low["content"][0]]}], GREEDY)
    assert calls == [None, 512]


def test_beside_text(llm: LLM):
    want = llm.chat([user(RED, "?")], GREEDY).token_ids, llm.generate("the sea", GREEDY)[0].token_ids
    streams = llm.chat([user(RED, "?")], GREEDY, stream=True), llm.generate("the sea", GREEDY, stream=True)
    got = [list(next(stream).token_ids) for stream in streams]
    for i, stream in enumerate(streams):
        for piece in stream:
            got[i] += piece.token_ids
    assert (tuple(got[0]), tuple(got[1])) == want


def test_a_stream_that_is_dropped_lets_go(llm: LLM):
    stream = llm.chat([user(LARGE, "?")], GREEDY, stream=True)
    next(stream)
    assert isinstance(llm.loop.runner, Runner)
    assert llm.loop.runner.image_tokens > 0, "until the step after the prompt's last"
    stream.close()  # type: ignore[attr-defined]
    assert llm.loop.runner.image_tokens == 0


# ---- refused before anything runs ------------------------------------------------------------------------------------


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def bomb(side: int) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


def url(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": text}}]}]


NOISE = io.BytesIO()
Image.effect_noise((90, 90), 60).save(NOISE, "PNG")
CUT = NOISE.getvalue()[: len(NOISE.getvalue()) // 2]  # its header is whole


@pytest.mark.parametrize(
    ("messages", "error", "says"),
    [
        (lambda: [user("x"), user("y", CUT)], BadImage, r"messages\[1\], image 1 cannot be decoded: .*truncated"),
        (lambda: [user(bomb(500))], BadImage, r"image 1 cannot be decoded"),
        (lambda: [user(bomb(60000))], ImageTooLarge, "60000 x 60000 pixels, at most 8192"),
        (lambda: url("data:image/png;base64,"), BadImage, "0 bytes"),
        (lambda: [user(*[RED] * 601)], TooManyImages, "image 601"),
        (lambda: url("https://example.com/cat.png"), ImageNotFetched, "nothing is fetched"),
        (lambda: [user(*[LARGE] * 9)], PromptTooLong, "over the limit of 300"),
        (lambda: [user(*[LARGE] * 4)], CapacityError, r"needs \d+ image tokens, the engine has 130"),
        (lambda: [{"role": "assistant", "content": [part(RED)]}], BadMessages, "Image in assistant"),
    ],
    ids=["cut", "short", "bomb", "empty", "many", "address", "long", "rows", "assistant"],
)
def test_refusals(llm: LLM, messages: Callable[[], Any], error: type[Exception], says: str):
    steps = len(llm.loop.times)
    with pytest.raises(error, match=says):
        llm.chat(messages(), GREEDY)
    with pytest.raises(error, match=says):
        llm.chat(messages(), GREEDY, stream=True)
    assert len(llm.loop.times) == steps


def test_no_pixel_is_decoded_of_a_prompt_that_is_too_long(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(llm.model, "read_image", lambda *a: pytest.fail("pixels were read"))
    with pytest.raises(PromptTooLong):
        llm.chat([user(*[LARGE] * 9)], GREEDY)


def test_ids_alone_bring_no_image(llm: LLM):
    with pytest.raises(BadImage, match=r"prompts\[1\] holds the image token, 4090"):
        llm.generate([[5, 6], [5, 4090, 6]], GREEDY)
    assert llm.tokenizer is not None
    (done,) = llm.generate("<｜image｜> is only text", GREEDY)
    assert 4090 not in done.prompt_token_ids


def test_a_model_that_reads_text_only(tmp_path: Path):
    with LLM(write(tmp_path / "model", tmp_path, vision_config=None), cpu__threads=1) as llm:
        with pytest.raises(NoVision, match="has no vision_config"):
            llm.chat([user(RED, "?")], GREEDY)
        assert llm.chat([user("Hi")], GREEDY).error is None
        assert llm.generate([5, 4090], GREEDY)[0].error is None, "an id like any other there"


def test_a_tokenizer_of_another_model(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(llm, "_encoder", None)
    monkeypatch.setattr(type(llm.model), "image_token_id", 17)
    with pytest.raises(BadConfigKey, match=r"image_token_id is 17, want 4090, the image token of tokenizer\.json"):
        llm.chat([user("Hi")], GREEDY)
