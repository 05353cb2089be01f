"""The memory plan: what each GPU of a layout will hold, worked out from config.json before a weight is read.

The layout is the engine's own: every GPU computes the attention of its own requests (DP) and holds its share of the
experts (EP) over the same GPUs. What every rank needs whole (attention, shared experts, embeddings, head, vision) lies
on every GPU. The n-gram tables lie in host memory once a machine, or row by row over the GPUs. No torch.
"""

import re
from dataclasses import dataclass

from benthic.cache.spec import BLOCK_TOKENS, block_layout, slot_layout
from benthic.config import GpuConfig, SchedulerConfig
from benthic.errors import BadField
from benthic.models.deepseek_v41_config import ModelConfig, cache_spec, tensors

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Gpu:
    """A card, as the driver reports it."""

    name: str
    memory_bytes: int


GPUS = {  # total memory as nvidia-smi shows it
    gpu.name: gpu
    for gpu in (
        Gpu("H100", 81559 * MIB),
        Gpu("H200", 143771 * MIB),
        Gpu("H20", 97871 * MIB),
        Gpu("H20-141", 143771 * MIB),
    )
}
CONTEXT_BYTES = 900 * MIB  # the driver's own: context, loaded kernels, cuBLAS work space
GRAPH_BYTES = 400 * MIB  # of captured steps, beside the pool of activations that they share
LINK_BYTES = 2 << 30  # buffers of dispatch and combine, when there is more than one GPU
MARGIN = 0.02  # of the card, left alone


@dataclass(frozen=True, slots=True)
class Part:
    """One line of the plan."""

    name: str
    bytes: int  # on each GPU
    how: str  # where the number comes from


@dataclass(frozen=True, slots=True)
class Fit:
    """What each of `count` GPUs holds."""

    gpu: Gpu
    count: int
    parts: tuple[Part, ...]
    host_bytes: int  # locked memory of the machine, all GPUs together
    block_bytes: int
    blocks: int  # of 128 tokens that fit beside the parts; 0 where the parts alone do not fit

    @property
    def used_bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def free_bytes(self) -> int:
        """Left for KV blocks; negative where the parts alone do not fit."""
        return self.gpu.memory_bytes - self.used_bytes

    @property
    def tokens(self) -> int:
        """Tokens of context that the blocks of one GPU hold."""
        return self.blocks * BLOCK_TOKENS


def parse_gpus(text: str) -> tuple[Gpu, int]:
    """`H200:8` -> the card and how many. Raises BadField."""
    match = re.fullmatch(r"([A-Za-z0-9-]+?)(?::(\d+))?", text)
    gpu = GPUS.get(match[1].upper()) if match else None
    count = int(match[2] or 1) if match else 0
    if gpu is None or not 1 <= count <= 1024:
        raise BadField("fit", text, f"a card and a number, such as H200:8; cards: {', '.join(GPUS)}")
    return gpu, count


def fit(
    config: ModelConfig,
    gpu: Gpu,
    count: int = 1,
    *,
    running: int = 256,
    token_budget: int = 8192,
    image_tokens: int = SchedulerConfig().image_tokens,
    tables_on_host: bool = True,
    drafter: bool = True,
) -> Fit:
    """The plan of one GPU out of `count`.

    running       requests that run at the same time on one GPU, a state slot each
    token_budget  most rows of a step, which sizes the activations
    image_tokens  most image rows that wait on the card for their step
    Raises        BadField when the experts do not divide over the GPUs.
    """
    text = config.text
    for name, experts in (("n_routed_experts", text.n_routed_experts),) + (
        (("dspark_n_routed_experts", text.dspark_n_routed_experts),) if drafter else ()
    ):
        if experts % count:
            raise BadField("fit", count, f"a number of GPUs that divides {name}, {experts}")
    sizes = {"experts": 0, "tables": 0, "drafter experts": 0, "drafter": 0, "vision": 0, "dense": 0}
    for name, spec in tensors(config).items():
        section = spec.group.partition(".")[0]
        routed = ".ffn.experts." in name
        if section == "dspark":
            sizes["drafter experts" if routed else "drafter"] += spec.nbytes
        elif spec.group == "engram.tables":
            sizes["tables"] += spec.nbytes
        elif section == "vision":
            sizes["vision"] += spec.nbytes
        else:
            sizes["experts" if routed else "dense"] += spec.nbytes
    graphed = max(min(GpuConfig().graph_rows, token_budget), running)
    spec = cache_spec(config, drafter=drafter)
    block, slot = block_layout(spec.append), slot_layout(spec, rollback=text.dspark_block_size if drafter else 0)
    share = f"1/{count}" if count > 1 else "all"
    parts = [
        Part("dense weights", sizes["dense"], "attention, shared experts, embeddings, head: whole on every GPU"),
        Part("routed experts", sizes["experts"] // count, f"{share} of {text.n_routed_experts} a layer"),
    ]
    if sizes["vision"]:
        parts.append(Part("vision", sizes["vision"], "tower and aligner, whole on every GPU"))
        rows = image_tokens * text.hidden_size * 2
        parts.append(
            Part("image rows", rows, f"{image_tokens} of {2 * text.hidden_size} bytes, scheduler.image_tokens")
        )
    if drafter and sizes["drafter"]:
        drafts = sizes["drafter"] + sizes["drafter experts"] // count
        parts.append(Part("drafter", drafts, f"dense part whole, {share} of its experts"))
    if sizes["tables"] and not tables_on_host:
        parts.append(Part("n-gram tables", -(-sizes["tables"] // count), f"{share} of the rows"))
    parts += [
        Part("state slots", (running + 1) * slot.slot_bytes, f"{running} running requests of {slot.slot_bytes} bytes"),
        Part("block tables", (running + 1) * 4 * -(-text.max_position_embeddings // BLOCK_TOKENS), "4 bytes a block"),
        Part("activations", activation_bytes(config, token_budget, running), f"a step of {token_budget} rows"),
        Part("graphs", GRAPH_BYTES + activation_bytes(config, graphed, running), f"captured, up to {graphed} rows"),
        Part("driver", CONTEXT_BYTES, "context, kernels"),
    ]
    if count > 1:
        parts.append(Part("link buffers", LINK_BYTES, "dispatch and combine"))
    parts.append(Part("margin", int(MARGIN * gpu.memory_bytes), f"{MARGIN:.0%} of the card"))
    free = gpu.memory_bytes - sum(part.bytes for part in parts)
    blocks = max(free // block.block_bytes, 0)
    host = sizes["tables"] if tables_on_host else 0
    return Fit(gpu, count, tuple(parts), host, block.block_bytes, blocks)


def activation_bytes(config: ModelConfig, rows: int, sampled: int) -> int:
    """Most memory that the tensors of one step hold at a time, bytes.

    Two copies of the streams, the query and attention output, the experts' permuted rows with both halves of the hidden
    layer and their results, and float32 logits with as much again for the sampler.
    """
    t = config.text
    streams = 2 * rows * t.hc_mult * t.hidden_size * 2
    attention = 2 * rows * t.num_attention_heads * t.head_dim * 2
    routed = rows * t.num_experts_per_tok
    experts = routed * (t.hidden_size * 2 + 2 * t.moe_intermediate_size * 2 + t.moe_intermediate_size * 2)
    experts += routed * t.hidden_size * 2
    logits = 2 * min(sampled, rows) * t.vocab_size * 4
    return streams + max(attention, experts) + logits


def render(plan: Fit) -> str:
    """The plan for a terminal."""
    gib = 1 << 30
    lines = [f"{plan.count} x {plan.gpu.name}, {plan.gpu.memory_bytes / gib:.1f} GiB each; bytes on each GPU:"]
    lines += [
        f"  {part.name:<16}{_spaced(part.bytes):>18}  {part.bytes / gib:8.2f} GiB  {part.how}" for part in plan.parts
    ]
    lines.append(f"  {'total':<16}{_spaced(plan.used_bytes):>18}  {plan.used_bytes / gib:8.2f} GiB")
    if plan.free_bytes < 0:
        lines.append(f"does not fit: {-plan.free_bytes / gib:.2f} GiB too much; use more GPUs, or larger ones")
    else:
        lines.append(
            f"  {'KV blocks':<16}{_spaced(plan.blocks * plan.block_bytes):>18}  {plan.free_bytes / gib:8.2f} GiB  "
            f"{plan.blocks} blocks of {plan.block_bytes} bytes, {_spaced(plan.tokens)} tokens"
        )
    if plan.host_bytes:
        lines.append(
            f"host memory       {_spaced(plan.host_bytes):>16}  {plan.host_bytes / gib:8.2f} GiB  n-gram tables, locked"
        )
    return "\n".join(lines)


def as_json(plan: Fit) -> dict[str, object]:
    """The plan as plain data, bytes throughout."""
    return {
        "gpu": plan.gpu.name,
        "gpus": plan.count,
        "memory_bytes": plan.gpu.memory_bytes,
        "parts": {part.name: part.bytes for part in plan.parts},
        "used_bytes": plan.used_bytes,
        "free_bytes": plan.free_bytes,
        "fits": plan.free_bytes >= 0,
        "blocks": plan.blocks,
        "block_bytes": plan.block_bytes,
        "tokens": plan.tokens,
        "host_bytes": plan.host_bytes,
    }


def _spaced(number: int) -> str:
    return f"{number:,}".replace(",", " ")
