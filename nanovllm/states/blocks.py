"""StateBlocks: the blocks of a model with states, and the states that it keeps for later prompts.

A running sequence has the row of the pool that its slot has. The rows after these keep states of prefixes: a
prompt is computed from the last kept state on whose tokens and K/V it shares. No row is both written and read
by the sequences of one step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
import xxhash

from nanovllm.batch import PADDING
from nanovllm.plan.block_manager import BlockManager, Found
from nanovllm.plan.prefix_tree import ROOT, TOKEN_BYTES, num_common
from nanovllm.plan.sequence import Room, Sequence
from nanovllm.states.kernels.packed import CHUNK
from nanovllm.states.policy import StatePolicy
from nanovllm.states.spec import num_kept

MOST_PAST = 16  # tokens with which a template begins an answer
_AHEAD = 32  # waiting prompts that a prompt is compared with when it begins
_LEAST = 16  # tokens that a state spares those, or else it is not kept for them


class Kept(NamedTuple):
    """A kept state: after these tokens, int32, of a sequence with this root."""

    row: int
    tokens: bytes
    root: int


class KeptStates:
    """Which tokens each row keeps the state of. Those at which prompts parted are dropped last."""

    def __init__(self, first: int, count: int) -> None:
        self._free = list(range(first, first + count))
        # By length and hash, least recently used first: states at the ends of prompts, and the others.
        self._ends: OrderedDict[tuple[int, int], Kept] = OrderedDict()
        self._partings: OrderedDict[tuple[int, int], Kept] = OrderedDict()
        self._lengths: dict[int, int] = {}  # of the kept tokens, in bytes, and how many have each

    def find(self, tokens: bytes, root: int = ROOT) -> Kept | None:
        """The longest beginning of these tokens that is kept. root: of the sequence, here and below."""
        for length in sorted(self._lengths, reverse=True):
            if length <= len(tokens):
                found = self.get(tokens[:length], root)
                if found is not None:
                    return found
        return None

    def get(self, tokens: bytes, root: int = ROOT) -> Kept | None:
        """The state after exactly these tokens, used now."""
        key = _key(tokens, root)
        for kind in (self._partings, self._ends):
            found = kind.get(key)
            if found is not None and found.tokens == tokens and found.root == root:
                kind.move_to_end(key)
                return found
        return None

    def add(self, tokens: bytes, is_end: bool, pinned: set[int], root: int = ROOT) -> int | None:
        """A row for the state after these tokens, which replaces another that is not pinned; None if there is
        none, or their hashes are equal."""
        key = _key(tokens, root)
        if key in self._partings or key in self._ends:
            return None
        row = self._free.pop() if self._free else self._drop(pinned)
        if row is not None:
            (self._ends if is_end else self._partings)[key] = Kept(row, tokens, root)
            self._lengths[len(tokens)] = self._lengths.get(len(tokens), 0) + 1
        return row

    def part(self, tokens: bytes, root: int = ROOT) -> None:
        """Prompts part after these tokens: their state is dropped last."""
        key = _key(tokens, root)
        if key in self._ends:
            self._partings[key] = self._ends.pop(key)

    def past(self, prompt: bytes, shared: int, root: int = ROOT) -> int:
        """How many tokens another prompt, whose end is kept, has after the first `shared` ones, if these are
        the same with which this prompt ends; 0 if there is none. They are the beginning of an answer, which
        a template does not repeat in a chat that goes on."""
        begins = shared * TOKEN_BYTES
        for kept in self._ends.values():
            rest = kept.tokens[begins:]
            is_short = 0 < len(rest) <= MOST_PAST * TOKEN_BYTES and kept.root == root
            if is_short and prompt.endswith(rest) and kept.tokens.startswith(prompt[:begins]):
                return len(rest) // TOKEN_BYTES
        return 0

    def clear(self) -> None:
        for _, kept in self._all():
            self._free.append(kept.row)
        self._ends.clear()
        self._partings.clear()
        self._lengths.clear()

    def __len__(self) -> int:
        return len(self._ends) + len(self._partings)

    def _all(self) -> Iterator[tuple[tuple[int, int], Kept]]:
        yield from self._ends.items()
        yield from self._partings.items()

    def _drop(self, pinned: set[int]) -> int | None:
        """Forget a state; return its row."""
        for key, kept in self._all():
            if kept.row not in pinned:
                self._ends.pop(key, None)
                self._partings.pop(key, None)
                self._lengths[len(kept.tokens)] -= 1
                if not self._lengths[len(kept.tokens)]:
                    del self._lengths[len(kept.tokens)]
                return kept.row
        return None


def _key(tokens: bytes, root: int) -> tuple[int, int]:
    return len(tokens), xxhash.xxh3_64_intdigest(tokens, seed=abs(root))


class StateBlocks(BlockManager):
    """As `BlockManager`, for layers of which some have a state.

    A prompt takes what is cached up to the last kept state. The step that computes it keeps its state at the
    tokens where the next waiting prompts part from it, and where it shares more than it took: such prompts
    begin there. A state that the step being
    planned computes can be read in the next one, so a prompt that would read it waits.
    """

    def __init__(self, room: Room, enable_prefix_caching: bool = True, share_outputs: bool = True) -> None:
        super().__init__(room, enable_prefix_caching, share_outputs)
        policy = room.groups[-1].policy
        assert isinstance(policy, StatePolicy)
        # With `deterministic`, which shares no outputs, a state is that of whole chunks of a prompt.
        self.grid = 1 if share_outputs else CHUNK
        self.kept = KeptStates(policy.num_seqs, num_kept(policy.num_seqs))
        self._found: Found = [], PADDING, 0
        self._wanted: dict[int, list[tuple[int, bool]]] = {}  # by sequence: positions, and whether an end
        self._past = 0  # tokens after those with which a chat goes on, at the end of its prompt
        # Of the step being planned: (kept row, sequence, position, whether it is saved), and these rows.
        self._moves: list[tuple[int, Sequence, int, bool]] = []
        self._read: set[int] = set()
        self._written: set[int] = set()

    def allocate(self, seq: Sequence, spare: int = 0) -> bool:
        """Also False if the state to begin with is computed by the step being planned."""
        found, known = super()._find_prefix(seq), seq.num_known_tokens
        shared = len(found[0]) * self.block_size + found[2]
        kept = self.kept.find(seq.token_bytes(0, shared), seq.root) if shared else None
        if kept is not None and kept.row in self._written:
            return False
        self._found = self._up_to(found, 0 if kept is None else len(kept.tokens) // TOKEN_BYTES)
        if not super().allocate(seq, spare):
            return False
        begin = seq.num_computed_tokens
        if begin:
            assert kept is not None
            self._moves.append((kept.row, seq, begin, False))
            self._read.add(kept.row)
            if begin < seq.num_prompt_tokens:
                self.kept.part(kept.tokens, seq.root)
        if self.enable_prefix_caching:
            if shared > begin:
                prompt = seq.token_bytes(0, known)
                self._past = self.kept.past(prompt, shared, seq.root) or self._past
            partings = {shared, known - 1 if seq.params.n > 1 else 0, *self._partings_ahead(seq)}
            wanted = {each - each % self.grid: False for each in partings if begin < each < known}
            end = known - self._past
            wanted.setdefault(end - end % self.grid, True)
            wanted = {each: is_end for each, is_end in wanted.items() if each > begin}
            self._wanted[seq.seq_id] = sorted(wanted.items())
        return True

    def _partings_ahead(self, seq: Sequence) -> list[int]:
        """Where the next waiting prompts part from this one, the first of them, if it is worth it."""
        begin, known = seq.num_computed_tokens, seq.num_known_tokens
        first, tokens = seq.token_bytes(begin, begin + _LEAST), seq.token_bytes(0, known)
        commons = {
            min(num_common(tokens, other.token_bytes(0, other.num_known_tokens)), known - 1)
            for other in islice(self.coming, 1, 1 + _AHEAD)
            if other.root == seq.root and other.token_bytes(begin, begin + _LEAST) == first
        }
        partings: list[int] = []
        for common in sorted(commons):
            if common >= begin + _LEAST:
                partings.append(common)
                begin = common
        return partings

    def _find_prefix(self, seq: Sequence) -> Found:
        return self._found

    def _up_to(self, found: Found, position: int) -> Found:
        """The part of what is found before a position."""
        hits, source, cells = found
        count, rest = divmod(position, self.block_size)
        if count < len(hits):
            source, cells = hits[count], self.block_size
        return (hits[:count], source, min(cells, rest)) if rest else (hits[:count], PADDING, 0)

    def _fitting(self, seq: Sequence, found: Found, spare: int) -> Found | None:
        """All that is found or nothing: between the two there is no state."""
        nothing: Found = [], PADDING, 0
        for each in (found, nothing):
            if self._fits(seq, each, spare):
                return each
        return None

    def register(self, seq: Sequence, rest: bool = False) -> None:
        """Also keeps the states that the step being planned computes of this sequence."""
        super().register(seq, rest)
        wanted = self._wanted.get(seq.seq_id)
        while wanted and wanted[0][0] <= seq.num_computed_tokens:
            position, is_end = wanted.pop(0)
            tokens = seq.token_bytes(0, position)
            if self.kept.get(tokens, seq.root) is None:
                row = self.kept.add(tokens, is_end, self._read | self._written, seq.root)
                if row is not None:
                    self._moves.append((row, seq, position, True))
                    self._written.add(row)

    def take_copies(self) -> tuple[np.ndarray, ...]:
        """Also those of states: kept row, slot, position, whether it is saved."""
        copies = super().take_copies()
        if not self._moves:
            return copies
        moves = [(row, seq.slot, position, saved) for row, seq, position, saved in self._moves]
        self._moves, self._read, self._written = [], set(), set()
        return *(copies or (np.empty((0, 4), np.int32),)), np.array(moves, np.int32)

    def free(self, seq: Sequence) -> None:
        self._wanted.pop(seq.seq_id, None)
        super().free(seq)

    def reset(self) -> bool:
        is_reset = super().reset()
        if is_reset:
            self.kept.clear()
            self._past = 0
        return is_reset
