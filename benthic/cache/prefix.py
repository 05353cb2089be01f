"""Which tokens lie in which block: chained keys, the index of cached blocks, and why a block was missed. No torch.

A key is 32 bytes: H(0) = SHA-256("benthic.kv.1", namespace), H(i+1) = SHA-256(H(i), the block's ids as little-endian
uint32, extras). It stands for the block and for everything before it, in every process and on every machine. Whatever
else decides what a block holds goes into the namespace, never into the index. Source: service specification, 2.1.
"""

import hashlib
import hmac
import struct
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from sys import byteorder
from typing import NamedTuple

from benthic.cache.eviction import Policy
from benthic.types import Miss

Key = bytes

_AT_A_TIME = 256  # blocks whose ids are converted together: what is copied stays in the processor's cache
_LOST_PER_BLOCK = 4  # keys of lost blocks remembered, as a multiple of the pool


def namespace(*parts: bytes) -> bytes:
    """Digest of everything but the tokens that decides what a block holds. Parts are told apart by their lengths."""
    digest = hashlib.sha256(b"benthic.kv.ns.1")
    for part in parts:
        digest.update(struct.pack("<Q", len(part)) + part)
    return digest.digest()


def root(space: bytes, salt: bytes = b"") -> Key:
    """H(0) of a namespace. A salt, the secret of those who share a cache, opens another one."""
    if salt:
        space = hmac.digest(salt, space, "sha256")
    return hashlib.sha256(b"benthic.kv.1" + space).digest()


def chain(
    before: Key, ids: Sequence[int], block_tokens: int, extras: Callable[[int], bytes] | None = None
) -> list[Key]:
    """Keys of the whole blocks in `ids`, the first of which follows the block whose key is `before`.

    ids     below 2**32; as array("I") they need no conversion.
    extras  number of a block, counted from the first in `ids` -> what else it holds (image digests), or b"".
    Cost    for a block of 128 little more than SHA-256, 0.6 us; of a list, at least as much again to read its numbers.
    """
    size, step, sha256 = 4 * block_tokens, _AT_A_TIME * block_tokens, hashlib.sha256
    keys: list[Key] = []
    for first in range(0, len(ids), step):
        data = array("I", ids[first : first + step])  # a copy, in the form that is hashed
        if byteorder != "little":
            data.byteswap()
        raw = data.tobytes()
        for at in range(0, len(raw) - size + 1, size):
            content = before + raw[at : at + size]
            if extras is not None:
                content += extras(len(keys))
            before = sha256(content).digest()
            keys.append(before)
    return keys


class Node:
    """One cached block."""

    __slots__ = ("block", "children", "expires", "hits", "key", "parent")

    def __init__(self, key: Key, block: int, parent: "Node | None", expires: float):
        self.key, self.block, self.parent, self.expires = key, block, parent, expires
        self.children: dict[Key, Node] = {}
        self.hits = 0  # since it was idle last


class Found(NamedTuple):
    """The longest cached prefix of a list of keys."""

    nodes: list[Node]
    miss: Miss | None  # why the next key is not there; None: there is no next one


class PrefixIndex:
    """Cached blocks by key. A block in it is held by leases or idle; an idle one is given up when room is needed.

    Whoever holds a block holds all before it, so that below an idle block every block is idle too.
    """

    def __init__(self, policy: Policy, capacity: int, ttl_seconds: float = 0.0):
        """capacity: blocks of the pool. ttl_seconds: a block not hit for so long is not found any more; 0: no limit."""
        self.policy, self.ttl_seconds = policy, ttl_seconds
        self.nodes: dict[Key, Node] = {}
        self._of_block: dict[int, Node] = {}
        self._flying: dict[Key, object] = {}  # blocks that somebody computes now
        self._lost: OrderedDict[Key, Miss] = OrderedDict()
        self._first: OrderedDict[bytes, set[Key]] = OrderedDict()  # ids of a first block -> roots it was seen under
        self._remembered = _LOST_PER_BLOCK * capacity

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def idle(self) -> int:
        """Blocks that can be given up."""
        return len(self.policy)

    def find(self, keys: Sequence[Key], now: float) -> Found:
        """Longest prefix that is there and has not expired."""
        nodes: list[Node] = []
        for key in keys:
            node = self.nodes.get(key)
            if node is None:
                flying = key in self._flying
                return Found(nodes, Miss.IN_FLIGHT if flying else self._lost.get(key, Miss.NEVER_SEEN))
            if node.expires <= now:
                return Found(nodes, Miss.EXPIRED)
            nodes.append(node)
        return Found(nodes, None)

    def in_flight(self, key: Key) -> bool:
        """Is somebody computing this block now?"""
        return key in self._flying

    def touch(self, nodes: Iterable[Node], now: float) -> None:
        """A hit: the blocks live on."""
        expires = now + self.ttl_seconds if self.ttl_seconds else float("inf")
        for node in nodes:
            node.hits += 1
            node.expires = expires

    def add(self, key: Key, before: Key | None, block: int, now: float) -> Node:
        """Cache a block that its owner holds. If the key is there already, that node is returned, to live on.

        before  key of the block before it, which the owner holds too; None: it is the first.
        """
        expires = now + self.ttl_seconds if self.ttl_seconds else float("inf")
        known = self.nodes.get(key)
        if known is not None:
            known.expires = expires
            return known
        parent = None if before is None else self.nodes[before]
        node = self.nodes[key] = self._of_block[block] = Node(key, block, parent, expires)
        if parent is not None:
            parent.children[key] = node
        self._lost.pop(key, None)
        self._flying.pop(key, None)
        return node

    def of_block(self, block: int) -> Node | None:
        return self._of_block.get(block)

    # ---- held and idle -----------------------------------------------------------------------------------------------

    def held(self, node: Node) -> None:
        """Its first holder came."""
        self.policy.hold(node.key)

    def let_go(self, node: Node) -> None:
        """Its last holder went."""
        self.policy.idle(node.key, node.hits)
        node.hits = 0

    def give_up(self) -> int:
        """Drop the block that is worth least and say which it was. Its end first: a prefix stays one."""
        node = self.nodes[self.policy.victim()]
        while node.children:
            node = next(iter(node.children.values()))
        self.drop(node, Miss.EVICTED)
        return node.block

    def drop(self, node: Node, reason: Miss) -> None:
        """Forget an idle block without children."""
        assert not node.children, f"block {node.block} still has {len(node.children)} blocks behind it"
        self.policy.drop(node.key)
        del self.nodes[node.key], self._of_block[node.block]
        if node.parent is not None:
            del node.parent.children[node.key]
        self._lost[node.key] = reason
        if len(self._lost) > self._remembered:
            self._lost.popitem(last=False)

    def expire(self, key: Key, now: float, is_idle: Callable[[int], bool]) -> list[int]:
        """Drop an expired block and everything behind it that is idle; returns their numbers, to be freed."""
        node = self.nodes.get(key)
        if node is None or node.expires > now:
            return []
        freed: list[int] = []
        stack = [node]
        order: list[Node] = []
        while stack:
            order.append(stack.pop())
            stack += order[-1].children.values()
        for each in reversed(order):
            if not each.children and is_idle(each.block):
                self.drop(each, Miss.EXPIRED)
                freed.append(each.block)
        return freed

    # ---- computed right now ------------------------------------------------------------------------------------------

    def announce(self, keys: Iterable[Key], by: object) -> None:
        """`by` is about to compute these blocks; of two who do, the first counts."""
        for key in keys:
            self._flying.setdefault(key, by)

    def withdraw(self, keys: Iterable[Key], by: object) -> None:
        for key in keys:
            if self._flying.get(key) is by:
                del self._flying[key]

    # ---- other namespaces --------------------------------------------------------------------------------------------

    def seen_elsewhere(self, ids: Sequence[int], under: Key) -> bool:
        """Did this first block come before under another root? Remembers that it came under this one."""
        content = hashlib.sha256(array("I", ids).tobytes()).digest()[:16]
        roots = self._first.setdefault(content, set())
        self._first.move_to_end(content)
        elsewhere = bool(roots - {under})
        if len(roots) < 8:
            roots.add(under)
        if len(self._first) > self._remembered:
            self._first.popitem(last=False)
        return elsewhere

    def check(self) -> None:
        """For tests."""
        assert len(self.nodes) == len(self._of_block)
        for key, node in self.nodes.items():
            assert node.key == key
            assert self._of_block[node.block] is node
            assert node.parent is None or node.parent.children[key] is node
            assert node.parent is None or self.nodes[node.parent.key] is node.parent
