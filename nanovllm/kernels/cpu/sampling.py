"""Draws one token per row of logits on a CPU, without sorting.

The first pass finds, for each block of the vocabulary, its largest logit and the sum of its weights, and the
largest one of every 16 logits. The second pass has one program for each row. It draws a block, then a token
of it. With filters it makes a list of the logits that reach a floor, which the largest ones of each 16 bound
closely: the list is hardly longer than top_k. All draws and rejections are those of `kernels/filters.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from nanovllm.batch import NOT_FINITE, FilterColumns
from nanovllm.kernels.cpu.launch import DTYPES, Address, Kernel, empty, scratch

BLOCK = 2048  # vocabulary entries, as of the siblings: drawn tokens depend on it
SEGMENT = 256  # likewise
_BLOCKS = 4  # of a program of the first pass
_GREEDY_BELOW = 1e-5
_LEAST_FACTOR = 1e-30
_LEAST = -3.4028234663852886e38  # of finite float32
_FIRST_KEY = -2139095041  # of -inf, in the order of floats
# The constants of kernels/random_bits.py as int64. Changes of that file would not compile kernels again.
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
_STEP, _OFFSET = 0x9E3779B97F4A7C15 - 2**64, 0xD1B54A32D192ED03 - 2**64


def _make_factor() -> Callable[[Any], Any]:
    from numba import njit
    from numpy import float32

    log2_e, least = float32(math.log2(math.e)), float32(_LEAST_FACTOR)

    @njit(nogil=True, error_model="numpy")
    def factor_of(temperature: Any) -> Any:
        """Weights are 2 ** ((logit - best) * factor)."""
        factor = log2_e / temperature
        return factor if factor > least else least

    return factor_of


def _make_blocks(dtype: str) -> Callable[..., None]:
    from numpy import float32

    from nanovllm.kernels.cpu import vector_math as m
    from nanovllm.kernels.cpu import vectors as v

    load, load_part, size = v.WHOLE[dtype][0], v.PART[dtype][0], v.SIZES[dtype]
    add, mul, sub, splat, maximum, largest, total_of = v.add, v.mul, v.sub, v.splat, v.maximum, v.largest, v.total
    first_lanes, store_f32, get_f32, set_f32 = v.first_lanes, v.store_f32, v.get_f32, v.set_f32
    exp2, bad_as_infinity = m.exp2_normal, m.bad_as_infinity  # too small to count
    factor_of = _make_factor()
    infinity, greedy_below = float32(math.inf), float32(_GREEDY_BELOW)
    block_size, segment_size, per_program = BLOCK, SEGMENT, _BLOCKS

    def sample_blocks(
        logits: Address,
        temperatures: Address,
        stats: Address,
        maxima: Address,
        logits_stride: int,
        vocab: int,
        blocks: int,
        segments: int,
        program: int,
        thread: int,
    ) -> None:
        parts = (blocks + per_program - 1) // per_program
        row, part = program // parts, program % parts
        temperature = get_f32(temperatures + 4 * row)
        drawn = temperature >= greedy_below
        logits += row * logits_stride * size
        nothing = splat(-infinity)
        for block in range(per_program * part, min(per_program * (part + 1), blocks)):
            start, end = block_size * block, min(block_size * (block + 1), vocab)
            top = nothing
            for first in range(start, end, segment_size):
                count = min(segment_size, end - first)
                most = nothing
                place = logits + size * first
                for i in range(count // 16):
                    most = maximum(bad_as_infinity(load(place + 16 * size * i)), most)
                rest = count % 16
                if rest:
                    x = load_part(place + size * (count - rest), rest)
                    most = maximum(first_lanes(bad_as_infinity(x), nothing, rest), most)
                store_f32(maxima + 64 * (row * segments + first // segment_size), most)
                top = maximum(most, top)
            best = largest(top)
            weight = float32(1.0)
            if drawn and best > -infinity and best < infinity:
                bests, factors = splat(best), splat(factor_of(temperature))
                sums = splat(0.0)
                whole, rest = (end - start) // 16, (end - start) % 16
                for i in range(whole):
                    x = load(logits + size * (start + 16 * i))
                    sums = add(sums, exp2(mul(sub(x, bests), factors)))
                if rest:
                    x = load_part(logits + size * (end - rest), rest)
                    weights = exp2(mul(sub(first_lanes(x, nothing, rest), bests), factors))
                    sums = add(sums, weights)
                weight = total_of(sums)
            cell = stats + 4 * (row * 2 * blocks + block)
            set_f32(cell, best)
            set_f32(cell + 4 * blocks, weight)

    return sample_blocks


def _make_random() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Functions that turn random numbers into choices."""
    from numba import njit

    from nanovllm.kernels.cpu import vectors as v
    get_f32, get_i32 = v.get_f32, v.get_i32
    first, second, step, offset = _FIRST, _SECOND, _STEP, _OFFSET
    segment_size = SEGMENT

    @njit(nogil=True, error_model="numpy")
    def mix(z: Any) -> Any:
        z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * first
        z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * second
        return z ^ ((z >> 31) & ((1 << 33) - 1))

    @njit(nogil=True, error_model="numpy")
    def random_word(seed: Any, position: Any, attempt: Any) -> Any:
        """`random_pair`: the upper 32 bits, and the lower ones."""
        return mix(mix(seed + offset) + ((attempt << 32) + position + 1) * step)

    @njit(nogil=True, error_model="numpy")
    def pick(weights: Any, count: Any, bits: Any) -> Any:
        """The index that the lower 32 bits choose among `count` weights; never one of weight 0."""
        total = 0.0
        for i in range(count):
            total += get_f32(weights + 4 * i)
        target = (bits & 0xFFFFFFFF) * 2.0**-32 * total
        upto, last = 0.0, 0
        for i in range(count):
            weight = get_f32(weights + 4 * i)
            if weight > 0.0:
                upto += weight
                last = i
                if upto > target:
                    break
        return last

    @njit(nogil=True, error_model="numpy")
    def segment_end(ids: Any, start: Any, count: Any) -> Any:
        """The end of the listed tokens in the segment of the one at `start`."""
        segment, end = get_i32(ids + 4 * start) // segment_size, start + 1
        while end < count and get_i32(ids + 4 * end) // segment_size == segment:
            end += 1
        return end

    @njit(nogil=True, error_model="numpy")
    def draw_listed(ids: Any, weights: Any, count: Any, word: Any) -> Any:
        """The place of a token of the list: first a segment of the vocabulary is drawn, then a token of it."""
        total, start = 0.0, 0
        while start < count:
            end = segment_end(ids, start, count)
            for i in range(start, end):
                total += get_f32(weights + 4 * i)
            start = end
        target = ((word >> 32) & 0xFFFFFFFF) * 2.0**-32 * total
        upto, start, chosen, chosen_end = 0.0, 0, 0, 1
        while start < count and upto <= target:
            end = segment_end(ids, start, count)
            mass = 0.0
            for i in range(start, end):
                mass += get_f32(weights + 4 * i)
            if mass > 0.0:
                upto += mass
                chosen, chosen_end = start, end
            start = end
        return chosen + pick(weights + 4 * chosen, chosen_end - chosen, word)

    return random_word, pick, draw_listed


def _make_lists(dtype: str) -> tuple[Callable[..., Any], ...]:
    """Functions that make and shorten lists: values, ids and weights of tokens, in the order of ids."""
    from numba import njit
    from numpy import float32

    from nanovllm.kernels.cpu import vector_math as m
    from nanovllm.kernels.cpu import vectors as v

    load, load_part, size = v.WHOLE[dtype][0], v.PART[dtype][0], v.SIZES[dtype]
    splat, first_lanes, mul, sub = v.splat, v.first_lanes, v.mul, v.sub
    load_f32, store_f32, get_f32, set_f32 = v.load_f32, v.store_f32, v.get_f32, v.set_f32
    get_i32, set_i32 = v.get_i32, v.set_i32
    reaching, lowest_bit, count_reaching, exp2 = m.reaching, m.lowest_bit, m.count_reaching, m.exp2
    splat_int, total_int = m.splat_int, m.total_int
    float_of_bits, bits_of_float = m.float_of_bits, m.bits_of_float
    infinity, segment_size, first_key = float32(math.inf), SEGMENT, _FIRST_KEY

    @njit(nogil=True, error_model="numpy")
    def load_logits(logits: Any, start: Any, vocab: Any) -> Any:
        """16 logits from `start` on; -inf past the end."""
        rest = vocab - start
        if rest >= 16:
            return load(logits + size * start)
        return first_lanes(load_part(logits + size * start, rest), splat(-infinity), rest)

    @njit(nogil=True, error_model="numpy")
    def find_first(logits: Any, maxima: Any, segments: Any, vocab: Any, best: Any) -> Any:
        """The first token whose logit is `best`."""
        bests = splat(best)
        for segment in range(segments):
            if reaching(load_f32(maxima + 64 * segment), bests):
                for start in range(segment_size * segment, vocab, 16):
                    bits = reaching(load_logits(logits, start, vocab), bests)
                    if bits:
                        return start + lowest_bit(bits)
        return 0

    @njit(nogil=True, error_model="numpy")
    def nth_largest(values: Any, vectors: Any, n: Any, best: Any) -> Any:
        """The n-th largest of the values, which fill this many vectors: bisection over the order of floats.

        best: the largest one. Keys are int32 in the order of floats.
        """
        bits = bits_of_float(best)
        low, high = first_key, (bits ^ ((bits >> 31) & 0x7FFFFFFF)) + 1
        while high - low > 1:
            middle = (low + high) >> 1
            floor = splat(float_of_bits(middle ^ ((middle >> 31) & 0x7FFFFFFF)))
            counts = splat_int(0)
            for i in range(vectors):
                counts = count_reaching(counts, load_f32(values + 64 * i), floor)
            if total_int(counts) >= n:
                low = middle
            else:
                high = middle
        return float_of_bits(low ^ ((low >> 31) & 0x7FFFFFFF))

    @njit(nogil=True, error_model="numpy")
    def list_from(
        logits: Any, maxima: Any, segments: Any, vocab: Any, floor: Any, values: Any, ids: Any, tile: Any
    ) -> Any:
        """List the tokens that reach `floor`; return their number. tile: room for 16 values."""
        floors, count = splat(floor), 0
        for segment in range(segments):
            if reaching(load_f32(maxima + 64 * segment), floors) == 0:
                continue
            for start in range(segment_size * segment, min(segment_size * (segment + 1), vocab), 16):
                x = load_logits(logits, start, vocab)
                bits = reaching(x, floors)
                if bits:
                    store_f32(tile, x)
                while bits:
                    lane = lowest_bit(bits)
                    set_f32(values + 4 * count, get_f32(tile + 4 * lane))
                    set_i32(ids + 4 * count, start + lane)
                    count += 1
                    bits &= bits - 1
        store_f32(values + 4 * count, splat(-infinity))  # the rest of the last vector
        return count

    @njit(nogil=True, error_model="numpy")
    def keep_before(values: Any, ids: Any, weights: Any, count: Any, floor: Any, last: Any, ties: Any) -> Any:
        """Keep the tokens above `floor`, and of those with this logit the ones up to id `last`, at most `ties`
        of them; return the number of tokens."""
        kept = 0
        for i in range(count):
            value = get_f32(values + 4 * i)
            if value < floor:
                continue
            if value == floor:
                if ties == 0 or get_i32(ids + 4 * i) > last:
                    continue
                ties -= 1
            set_f32(values + 4 * kept, value)
            set_i32(ids + 4 * kept, get_i32(ids + 4 * i))
            set_f32(weights + 4 * kept, get_f32(weights + 4 * i))
            kept += 1
        store_f32(values + 4 * kept, splat(-infinity))
        return kept

    @njit(nogil=True, error_model="numpy")
    def keep_first(values: Any, ids: Any, weights: Any, count: Any, n: Any, best: Any) -> Any:
        """Keep the `n` largest, of equal ones those with the lowest ids."""
        floor, above = nth_largest(values, (count + 15) // 16, n, best), 0
        for i in range(count):
            above += get_f32(values + 4 * i) > floor
        return keep_before(values, ids, weights, count, floor, get_i32(ids + 4 * (count - 1)), n - above)

    @njit(nogil=True, error_model="numpy")
    def weigh(values: Any, weights: Any, count: Any, best: Any, factor: Any) -> Any:
        """Write the weights of listed tokens."""
        for i in range((count + 15) // 16):
            x = load_f32(values + 64 * i)
            store_f32(weights + 64 * i, exp2(mul(sub(x, splat(best)), splat(factor))))

    return load_logits, find_first, nth_largest, list_from, keep_before, keep_first, weigh


def _make_filtered(dtype: str) -> Callable[..., Any]:
    from numba import njit
    from numpy import float32

    from nanovllm.kernels.cpu import vector_math as m
    from nanovllm.kernels.cpu import vectors as v

    get_f32, get_i32, size = v.get_f32, v.get_i32, v.SIZES[dtype]
    get = {"float32": v.get_f32, "bfloat16": v.get_bf16, "float16": m.get_f16}[dtype]
    random_word, _, draw_listed = _make_random()
    _, _, nth_largest, list_from, keep_before, keep_first, weigh = _make_lists(dtype)
    one, nothing, least = float32(1.0), float32(0.0), float32(_LEAST)

    @njit(nogil=True, error_model="numpy")
    def total(weights: Any, count: Any) -> Any:
        whole = 0.0
        for i in range(count):
            whole += get_f32(weights + 4 * i)
        return whole

    @njit(nogil=True, error_model="numpy")
    def draw_filtered(
        token: Any, whole: Any, seed: Any, position: Any, temperature: Any, factor: Any, best: Any,
        top_k: Any, top_p: Any, min_p: Any,
        logits: Any, maxima: Any, segments: Any, vocab: Any, values: Any, ids: Any, weights: Any,
    ) -> Any:  # fmt: skip
        """`token`, drawn from the whole vocabulary of weight `whole`, or another one if filters drop it."""
        limited = top_k > 0 and top_k < vocab
        count, listed = 0, False
        if limited or min_p > nothing:
            floor = least
            if min_p > nothing:
                floor = max(floor, best + float32(math.log(min_p)) * temperature)
            if limited and top_k <= 16 * segments:
                floor = max(floor, nth_largest(maxima, segments, top_k, best))
            count, listed = list_from(logits, maxima, segments, vocab, floor, values, ids, weights), True
            if limited and count > top_k:
                count = keep_first(values, ids, weights, count, top_k, best)
            weigh(values, weights, count, best, factor)
            whole = total(weights, count)
            token = get_i32(ids + 4 * draw_listed(ids, weights, count, random_word(seed, position, 0)))
        attempt = 0
        while top_p < one:
            floor = get(logits + size * token)
            if not listed:
                count, listed = list_from(logits, maxima, segments, vocab, floor, values, ids, weights), True
                weigh(values, weights, count, best, factor)
            count = keep_before(values, ids, weights, count, floor, token - 1, count)
            if not total(weights, count) >= top_p * whole:
                break
            attempt += 1
            token = get_i32(ids + 4 * draw_listed(ids, weights, count, random_word(seed, position, attempt)))
        return token

    return draw_filtered


def _make_pick(dtype: str) -> Callable[..., None]:
    from numpy import float32

    from nanovllm.kernels.cpu import vector_math as m
    from nanovllm.kernels.cpu import vectors as v

    splat, first_lanes, mul, sub, largest = v.splat, v.first_lanes, v.mul, v.sub, v.largest
    store_f32, get_f32, get_i32, get_i64, set_i64 = v.store_f32, v.get_f32, v.get_i32, v.get_i64, v.set_i64
    load_f32_part, exp2, maximum = v.load_f32_part, m.exp2, v.maximum
    size = v.SIZES[dtype]
    load_logits, find_first = _make_lists(dtype)[:2]
    random_word, pick, _ = _make_random()
    draw_filtered, factor_of = _make_filtered(dtype), _make_factor()
    infinity, greedy_below, one, nothing = float32(math.inf), float32(_GREEDY_BELOW), float32(1.0), float32(0.0)
    block_size, not_finite = BLOCK, NOT_FINITE

    def sample_pick(
        logits: Address,
        temperatures: Address,
        seeds: Address,
        positions: Address,
        top_ks: Address,
        top_ps: Address,
        min_ps: Address,
        stats: Address,
        maxima: Address,
        values: Address,
        ids: Address,
        weights: Address,
        out: Address,
        logits_stride: int,
        vocab: int,
        blocks: int,
        segments: int,
        room: int,
        program: int,
        thread: int,
    ) -> None:
        row = program
        logits += row * logits_stride * size
        stats += row * 8 * blocks
        maxima += row * 64 * segments
        values += thread * 4 * room
        ids += thread * 4 * room
        weights += thread * 4 * room
        tops = splat(-infinity)
        for i in range(0, blocks, 16):
            count = min(16, blocks - i)
            tops = maximum(first_lanes(load_f32_part(stats + 4 * i, count), splat(-infinity), count), tops)
        best = largest(tops)
        if not (best > -infinity and best < infinity):
            set_i64(out + 8 * row, not_finite)
            return
        temperature = get_f32(temperatures + 4 * row)
        if not temperature >= greedy_below:
            set_i64(out + 8 * row, find_first(logits, maxima, segments, vocab, best))
            return
        factor, bests = factor_of(temperature), splat(best)
        factors = splat(factor)
        whole = 0.0
        for i in range(0, blocks, 16):
            count = min(16, blocks - i)
            relative = mul(sub(load_f32_part(stats + 4 * i, count), bests), factors)
            shares = mul(load_f32_part(stats + 4 * (blocks + i), count), exp2(relative))
            store_f32(weights + 4 * i, shares)
        for i in range(blocks):
            whole += get_f32(weights + 4 * i)
        seed, position = get_i64(seeds + 8 * row), get_i32(positions + 4 * row)
        word = random_word(seed, position, 0)
        start = block_size * pick(weights, blocks, word >> 32)
        end = min(start + block_size, vocab)
        for i in range(start, end, 16):
            x = load_logits(logits, i, end)
            store_f32(weights + 4 * (i - start), exp2(mul(sub(x, bests), factors)))
        token = start + pick(weights, end - start, word)
        top_k, top_p, min_p = get_i32(top_ks + 4 * row), get_f32(top_ps + 4 * row), get_f32(min_ps + 4 * row)
        if (top_k > 0 and top_k < vocab) or top_p < one or min_p > nothing:
            token = draw_filtered(
                token, whole, seed, position, temperature, factor, best, top_k, top_p, min_p,
                logits, maxima, segments, vocab, values, ids, weights,
            )  # fmt: skip
        set_i64(out + 8 * row, token)

    return sample_pick


_BLOCKS_KERNEL, _PICK_KERNEL = Kernel(_make_blocks), Kernel(_make_pick)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    filters: FilterColumns[torch.Tensor],
) -> torch.Tensor:
    """`draw` of kernels/sampling.py."""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1 or vocab == 1
    out = empty((rows,), torch.int64)
    blocks, segments = -(-vocab // BLOCK), -(-vocab // SEGMENT)
    stats = empty((rows, 2, blocks), torch.float32)
    maxima = empty((rows, segments, 16), torch.float32)
    room = max(vocab, 16) + 32
    lists = [scratch(4 * room) for _ in range(3)]  # values, ids, weights
    variant, stride = (DTYPES[logits.dtype],), logits.stride(0)
    programs = rows * -(-blocks // _BLOCKS)
    _BLOCKS_KERNEL.launch(variant, programs, logits, temperature, stats, maxima, stride, vocab, blocks, segments)
    columns = temperature, seeds, positions, filters.top_k, filters.top_p, filters.min_p
    sizes = stride, vocab, blocks, segments, room
    _PICK_KERNEL.launch(variant, rows, logits, *columns, stats, maxima, *lists, out, *sizes)
    return out
