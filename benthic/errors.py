"""Every error a caller may catch. Each class knows its code, its HTTP status and whether trying again helps.

The text of an error says what happened, the values with their units, the limit, and what to change. The command line
prints that text as one line and turns `exit_code` into the process's exit code.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, ClassVar


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to `name`, or None when nothing is close."""
    matches = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return matches[0] if matches else None


class BenthicError(Exception):
    """Root of the tree. Not raised itself: raise the class that says what happened.

    code       stable identifier, part of the API
    status     HTTP status the server answers with
    retryable  True when the same call may succeed later without a change
    exit_code  of a command that ends with this error: 2 for bad input, 1 for all else
    """

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    exit_code: ClassVar[int] = 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors cross process boundaries with their text and fields; constructors take the parts of the text."""
        return _restore, (type(self), self.args), self.__dict__


def _restore(cls: type[BenthicError], args: tuple[Any, ...]) -> BenthicError:
    error = cls.__new__(cls, *args)
    error.args = args
    return error


# Configuration


class ConfigError(BenthicError):
    """A setting is unknown, has the wrong type or is out of range."""

    code, status, exit_code = "bad_config", 500, 2


class UnknownKey(ConfigError):
    """A configuration key that does not exist."""

    code = "unknown_config_key"

    def __init__(self, key: str, source: str, known: Iterable[str]):
        known = sorted(known)
        self.key = key
        self.nearest = nearest(key, known)
        hint = f"did you mean {self.nearest}?" if self.nearest else f"known keys: {', '.join(known)}"
        super().__init__(f"unknown setting {key} (from {source}); {hint}")


class BadSetting(ConfigError):
    """A configuration value of the wrong type or outside its range."""

    code = "bad_config_value"

    def __init__(self, key: str, value: object, want: str, source: str):
        self.key, self.value, self.want = key, value, want
        super().__init__(f"setting {key} is {value!r} (from {source}), want {want}")


class BadConfigFile(ConfigError):
    """A configuration file that cannot be read or is not TOML."""

    code = "bad_config_file"

    def __init__(self, path: object, detail: str):
        super().__init__(f"cannot read the configuration file {path}: {detail}")


# Checkpoints


class CheckpointError(BenthicError):
    """A checkpoint folder that cannot be used. Nothing of it stays loaded."""

    code, status = "bad_checkpoint", 500


class MissingCheckpointFile(CheckpointError):
    """A file that every checkpoint folder has is not there."""

    code = "missing_checkpoint_file"

    def __init__(self, path: object, remedy: str = "is this a checkpoint folder?"):
        super().__init__(f"{path} does not exist; {remedy}")


class MissingTensor(CheckpointError):
    """A tensor the architecture needs is in no shard."""

    code = "missing_tensor"

    def __init__(self, name: str, expected: str, missing: int = 1):
        """expected: dtype and shape in words; missing: how many tensors are missing in all, this one included."""
        self.name = name
        more = f" ({missing - 1} more are missing)" if missing > 1 else ""
        super().__init__(f"tensor {name} is missing, expected {expected}{more}; the download may be incomplete")


class UnknownTensor(CheckpointError):
    """A tensor that the architecture has no place for."""

    code = "unknown_tensor"

    def __init__(self, name: str, where: object, known: Iterable[str] = ()):
        self.name = name
        close = nearest(name, known)
        hint = f"; the nearest known tensor is {close}" if close else "; does config.json belong to these weights?"
        super().__init__(f"tensor {name} in {where} has no place in the model{hint}")


class DuplicateTensor(CheckpointError):
    """A tensor stored in two shards."""

    code = "duplicate_tensor"

    def __init__(self, name: str, first: object, second: object):
        self.name = name
        super().__init__(f"tensor {name} is stored twice, in {first} and in {second}; remove one")


class WrongShape(CheckpointError):
    """A stored tensor whose shape is not the architecture's."""

    code = "wrong_tensor_shape"

    def __init__(self, name: str, want: Iterable[int], got: Iterable[int]):
        self.name, self.want, self.got = name, tuple(want), tuple(got)
        super().__init__(
            f"tensor {name} has shape {list(self.got)}, expected {list(self.want)}; does config.json belong to it?"
        )


class WrongDtype(CheckpointError):
    """A stored tensor whose number format is not the architecture's."""

    code = "wrong_tensor_dtype"

    def __init__(self, name: str, want: str, got: str):
        self.name, self.want, self.got = name, want, got
        super().__init__(f"tensor {name} has dtype {got}, expected {want}")


class NonFiniteTensor(CheckpointError):
    """A weight that holds something else than numbers, or whose scales do."""

    code = "non_finite_tensor"

    def __init__(self, name: str):
        self.name = name
        super().__init__(f"weight {name} holds values that are no numbers; the file is damaged, copy it again")


class TruncatedFile(CheckpointError):
    """A shard shorter than its header says."""

    code = "truncated_file"

    def __init__(self, path: object, want_bytes: int, got_bytes: int):
        super().__init__(
            f"{path} has {got_bytes} bytes, its header needs {want_bytes}; it was cut short, copy it again"
        )


class BadShard(CheckpointError):
    """A file that is not in the safetensors format."""

    code = "bad_shard"

    def __init__(self, path: object, detail: str):
        super().__init__(f"{path} is not a readable safetensors file: {detail}")


class MissingShard(CheckpointError):
    """The index names a shard that is not in the folder."""

    code = "missing_shard"

    def __init__(self, path: object, index: object, tensors: int):
        super().__init__(f"{index} puts {tensors} tensors into {path}, which does not exist; copy the missing shard")


class BadIndex(CheckpointError):
    """The index of the shards is not readable or contradicts them."""

    code = "bad_index"

    def __init__(self, path: object, detail: str):
        super().__init__(f"{path} is not a usable index: {detail}")


class BadConfigKey(CheckpointError):
    """A key of the checkpoint's config.json that is missing, unknown, mistyped, out of range or contradicts another."""

    code = "bad_config_key"

    def __init__(self, key: str, value: object, want: str, path: object = "config.json"):
        self.key, self.value, self.want = key, value, want
        super().__init__(f"{path}: {key} is {value!r}, want {want}")


class MissingConfigKey(CheckpointError):
    """A key that config.json must have."""

    code = "missing_config_key"

    def __init__(self, key: str, want: str, path: object = "config.json"):
        self.key, self.want = key, want
        super().__init__(f"{path}: {key} is missing, want {want}")


class BadConfigJSON(CheckpointError):
    """A JSON file of the checkpoint that cannot be parsed."""

    code = "bad_config_json"

    def __init__(self, path: object, detail: str):
        super().__init__(f"{path} is not valid JSON: {detail}")


class CheckpointExists(CheckpointError):
    """A checkpoint is to be written where something already is."""

    code, exit_code = "checkpoint_exists", 2

    def __init__(self, path: object):
        super().__init__(f"{path} already exists; remove it or choose another folder")


class CheckpointNotWritten(CheckpointError):
    """The disk refused a checkpoint; nothing of it stays behind."""

    code = "checkpoint_not_written"

    def __init__(self, path: object, detail: str):
        super().__init__(f"cannot write the checkpoint {path}: {detail}; free space or choose another folder")


class BadTokenizer(CheckpointError):
    """The tokenizer file is not readable, or lacks a token the prompt format needs."""

    code = "bad_tokenizer"

    def __init__(self, path: object, detail: str):
        super().__init__(f"{path} is not a usable tokenizer: {detail}")


class BadGoldens(CheckpointError):
    """The goldens beside a checkpoint cannot be read, or are of another one."""

    code = "bad_goldens"

    def __init__(self, path: object, detail: str):
        super().__init__(f"{path} cannot be used as goldens: {detail}; `benthic verify --make-goldens` makes them anew")


class UnsupportedArchitecture(CheckpointError):
    """config.json names an architecture that Benthic does not serve."""

    code = "unsupported_architecture"

    def __init__(self, name: str, known: Iterable[str]):
        super().__init__(f"architecture {name!r} is not supported; supported: {', '.join(sorted(known))}")


# Tensors and devices


class ShapeError(BenthicError):
    """A kernel was handed a tensor it does not take. Raised before anything is computed or launched."""

    code = "bad_shape"

    def __init__(self, name: str, *, want: object, got: object):
        """name: op and argument, as in "swiglu: gate"."""
        self.name, self.want, self.got = name, want, got
        super().__init__(f"{name}: want {want}, got {got}")


class MissingDependency(BenthicError):
    """A command needs a package that only an extra installs."""

    code, status, exit_code = "missing_dependency", 500, 1

    def __init__(self, package: str, extra: str):
        super().__init__(f"this needs the package {package}, which is not installed; pip install 'benthic[{extra}]'")


class DeviceUnavailable(BenthicError):
    """The device asked for is not on this machine, or cannot run what is asked of it."""

    code, status, exit_code = "device_unavailable", 503, 2

    def __init__(self, device: str, detail: str):
        super().__init__(f"device {device} cannot be used: {detail}; `benthic doctor` lists what this machine can run")


class NativeBuildError(BenthicError):
    """The C kernels were asked for and cannot be compiled or loaded."""

    code = "native_build_failed"

    def __init__(self, detail: str):
        super().__init__(
            f"the native CPU kernels cannot be used: {detail}; install a C compiler, or set cpu.native to off"
        )


class KernelBuildError(BenthicError):
    """A CUDA kernel that cannot be compiled or loaded."""

    code = "kernel_build_failed"

    def __init__(self, detail: str):
        super().__init__(f"a CUDA kernel cannot be used: {detail}; without it Triton's kernels run")


class BenchError(BenthicError):
    """A measurement that could not be made."""

    code, status = "bench_failed", 500

    def __init__(self, what: str, detail: str):
        super().__init__(f"{what} could not be measured: {detail}")


class BadRecord(BenthicError):
    """A file of answers that an evaluation cannot go on from."""

    code, status, exit_code = "bad_record", 500, 2

    def __init__(self, path: object, detail: str):
        super().__init__(f"cannot go on from {path}: {detail}")


class BadTrace(BenthicError):
    """A file of requests to replay that cannot be read."""

    code, status, exit_code = "bad_trace", 500, 2

    def __init__(self, path: object, line: int, detail: str):
        """line: counted from 1; 0: the file as a whole."""
        where = f"{path}, line {line}" if line else f"{path}"
        super().__init__(f"{where} is no trace: {detail}")


# Other servers, that Benthic asks


class ServerUnreachable(BenthicError):
    """Nobody answers at an address, after every try."""

    code, status, retryable = "server_unreachable", 503, True

    def __init__(self, url: str, detail: str):
        super().__init__(f"{url} cannot be reached: {detail}; is the server up, and the address right?")


class ServerRefused(BenthicError):
    """A server answers, and will not serve this caller at all."""

    code, status, exit_code = "server_refused", 502, 2

    def __init__(self, url: str, detail: str):
        super().__init__(f"{url} refuses: {detail}")


# Requests


class RequestError(BenthicError):
    """The request cannot be served as it stands; the caller must change it."""

    code, status, exit_code = "bad_request", 400, 2


class BadField(RequestError):
    """A field of the request that is out of range or of the wrong type."""

    code = "bad_field"

    def __init__(self, field: str, value: object, want: str):
        """want: the allowed range in words, as in "a number in (0, 1]"."""
        self.field, self.value, self.want = field, value, want
        super().__init__(f"{field} is {value!r}, want {want}")


class PromptTooLong(RequestError):
    """The prompt leaves no room for one token within the context limit."""

    code = "prompt_too_long"

    def __init__(self, prompt_tokens: int, limit_tokens: int):
        self.prompt_tokens, self.limit_tokens = prompt_tokens, limit_tokens
        super().__init__(
            f"prompt is {prompt_tokens} tokens, {prompt_tokens - limit_tokens} over the limit of {limit_tokens}; "
            "shorten it or raise scheduler.max_context_tokens"
        )


class EmptyPrompt(RequestError):
    """A prompt of no tokens."""

    code = "empty_prompt"

    def __init__(self) -> None:
        super().__init__("the prompt has no tokens; give at least one")


class TokenOutOfRange(RequestError):
    """A token id that the model's vocabulary does not have."""

    code = "token_out_of_range"

    def __init__(self, field: str, token: int, vocab_size: int):
        """field: where the id stands, as in "prompt[3]"."""
        self.field, self.token, self.vocab_size = field, token, vocab_size
        super().__init__(f"{field} is token id {token}, want an id in [0, {vocab_size - 1}]")


class BadMessages(RequestError):
    """A conversation that the prompt format cannot express."""

    code = "bad_messages"

    def __init__(self, where: str, detail: str):
        """where: which message, as in "messages[2].content"."""
        super().__init__(f"{where}: {detail}")


class BadReceipt(RequestError):
    """A receipt that cannot be read, or that another model made."""

    code = "bad_receipt"

    def __init__(self, where: str, detail: str):
        super().__init__(f"receipt {where}: {detail}")


class UnknownModel(RequestError):
    """No such model: neither a packaged name nor a checkpoint folder."""

    code, status = "unknown_model", 404

    def __init__(self, name: str, known: Iterable[str]):
        known = sorted(known)
        self.name = name
        close = nearest(name, known)
        hint = f"did you mean {close}?" if close else f"packaged models: {', '.join(known) or 'none'}"
        super().__init__(f"no model {name!r}: not a packaged name and not a checkpoint folder; {hint}")


class InvalidJSON(RequestError):
    """Input that should be JSON and is not."""

    code = "invalid_json"

    def __init__(self, where: object, detail: str):
        """where: file and line or argument; detail: what the parser said."""
        super().__init__(f"{where} is not valid JSON: {detail}")


class InputFileError(RequestError):
    """A file given on the command line that cannot be read."""

    code = "bad_input_file"

    def __init__(self, path: object, detail: str):
        super().__init__(f"cannot read {path}: {detail}")


class CapacityError(RequestError):
    """One request needs more cache than the whole engine has, so waiting cannot help."""

    code = "request_exceeds_capacity"

    def __init__(self, what: str, need: int, have: int, setting: str):
        """what: the unit counted, as in "cache blocks"; setting: the one to raise."""
        self.need, self.have = need, have
        super().__init__(f"the request needs {need} {what}, the engine has {have}; shorten it or raise {setting}")


# The engine


class EngineError(BenthicError):
    """The engine cannot go on with a request that was fine."""

    code = "engine_error"


class EngineClosed(EngineError):
    """The engine was shut down."""

    code, status, retryable = "engine_closed", 503, True

    def __init__(self) -> None:
        super().__init__("the engine is closed and takes no requests; make a new one")


class DeadlinePassed(EngineError):
    """A request that could not begin before its deadline."""

    code, status, retryable = "deadline_passed", 503, True

    def __init__(self, request: int, waited: float, late: float):
        """waited, late: seconds since it came, and since its deadline."""
        super().__init__(
            f"request {request} waited {waited:.3f} s and had not begun when its deadline passed {late:.3f} s ago; "
            "send it again with a later deadline, or when fewer requests wait"
        )


class OutOfMemory(EngineError):
    """The memory the settings ask for is not there. Raised at start, before any request is taken."""

    code = "out_of_memory"

    def __init__(self, what: str, need_bytes: int, have_bytes: int, remedy: str):
        super().__init__(f"{what} needs {need_bytes} bytes, {have_bytes} are free; {remedy}")


class HostMemoryNotLocked(EngineError):
    """Host memory that a GPU was to read in place, and that the system does not lock where it is."""

    code = "host_memory_not_locked"

    def __init__(self, need_bytes: int, limit_bytes: int | None, detail: str):
        """limit_bytes: of locked memory, for this process (`ulimit -l`); None: there is none."""
        self.need_bytes, self.limit_bytes = need_bytes, limit_bytes
        limit = "unlimited" if limit_bytes is None else f"{limit_bytes} bytes"
        super().__init__(
            f"{need_bytes} bytes of host memory cannot be locked for a GPU: {detail}; the limit of locked memory, "
            f"ulimit -l, is {limit}; raise it (ulimit -l unlimited; of a container --ulimit memlock=-1; of a service "
            "LimitMEMLOCK=infinity), free memory of the host, or set gpu.engram_tables to device"
        )


class GateFailed(EngineError):
    """Answers computed here are not the model's. Nothing is served."""

    code, status = "gate_failed", 503

    def __init__(self, model: str, level: str, name: str, detail: str):
        """level and name: where the first deviation is."""
        self.level, self.name = level, name
        super().__init__(f"{model} computes wrong answers here: {level}, {name}: {detail}; `benthic verify` shows all")


class NonFiniteLogits(EngineError):
    """The model produced logits that are not numbers; no token is drawn from them."""

    code = "non_finite_logits"

    def __init__(self, request: int, position: int):
        super().__init__(
            f"request {request}: the logits at position {position} are not finite; "
            "the weights may be damaged, copy the checkpoint again"
        )


class ReplyFailed(EngineError):
    """What was made of a completion's tokens raised; the engine itself goes on."""

    code = "reply_failed"

    def __init__(self, request: int, tokens: int, error: Exception):
        super().__init__(
            f"request {request}: its answer could not be read after {tokens} tokens, {type(error).__name__}: {error}; "
            "this is a fault of this software, its traceback is in the log"
        )


class NoAllowedToken(RequestError):
    """The request's allowed and banned ids leave no token that may be produced."""

    code = "no_allowed_token"

    def __init__(self, request: int, position: int):
        super().__init__(
            f"request {request}: no token may be produced at position {position}; "
            "allowed_ids, banned_ids, logit_bias and min_tokens together leave none"
        )


# Training


class TrainingError(BenthicError):
    """A training run cannot start or go on: data, settings or a saved state that do not fit."""

    code = "training_error"


class BadTrainingData(TrainingError):
    """A corpus or data folder that cannot be used for training."""

    code, exit_code = "bad_training_data", 2

    def __init__(self, path: object, detail: str):
        super().__init__(f"cannot use {path} as training data: {detail}")


class BadTrainingState(TrainingError):
    """A saved training state that cannot be read, or belongs to another run."""

    code, exit_code = "bad_training_state", 2

    def __init__(self, path: object, detail: str):
        super().__init__(f"cannot go on from {path}: {detail}")


class BadImage(RequestError):
    """An image that cannot be read or placed."""

    code = "bad_image"


class ImageTooLarge(BadImage):
    """An image of more bytes or pixels than are read."""

    code = "image_too_large"

    def __init__(self, what: str, limit: str):
        """what: the image and its size, as in "messages[0], image 1 has 40 bytes"."""
        super().__init__(f"{what}, at most {limit} are read; scale it down")


class TooManyImages(BadImage):
    """More images than one conversation may hold."""

    code = "too_many_images"

    def __init__(self, where: str, limit: int):
        super().__init__(f"{where} is one too many: a conversation holds at most {limit} images")


class ImageNotFetched(BadImage):
    """An image given by an address instead of its bytes."""

    code = "image_not_fetched"

    def __init__(self, where: str, scheme: str):
        """scheme: of the URL, as in "https"; empty: it has none."""
        what = f"a URL of scheme {scheme!r}" if scheme else "no URL"
        super().__init__(
            f"{where} is {what}, and nothing is fetched here; send the bytes as a data URL: data:image/png;base64,..."
        )


class NoVision(RequestError):
    """An image for a model that has no vision tower."""

    code = "no_vision"

    def __init__(self) -> None:
        super().__init__(
            "the conversation holds an image, and this model reads text only: its config.json has no vision_config; "
            "leave the image out or choose a model with a vision tower"
        )
