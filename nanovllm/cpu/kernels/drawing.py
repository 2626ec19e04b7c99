"""Functions of a sampling program on a CPU: random numbers, choices among weights, and lists of the tokens
that filters keep.

Each `make_` returns compiled functions; addresses are integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from nanovllm.cpu.kernels.native import jit

SEGMENT = 256  # vocabulary entries, as in kernels/filters.py: drawn tokens depend on it
_LEAST = -3.4028234663852886e38  # of finite float32
_FIRST_KEY = -2139095041  # of -inf, in the order of floats
# The constants of kernels/random_bits.py as int64. Changes of that file would not compile kernels again.
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
_STEP, _OFFSET = 0x9E3779B97F4A7C15 - 2**64, 0xD1B54A32D192ED03 - 2**64


def make_random() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Functions that turn random numbers into choices."""
    from nanovllm.cpu.kernels import vectors as v

    get_f32, get_i32 = v.get_f32, v.get_i32
    first, second, step, offset = _FIRST, _SECOND, _STEP, _OFFSET
    segment_size = SEGMENT

    @jit
    def mix(z: Any) -> Any:
        z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * first
        z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * second
        return z ^ ((z >> 31) & ((1 << 33) - 1))

    @jit
    def random_word(seed: Any, position: Any, attempt: Any) -> Any:
        """`random_pair`: the upper 32 bits, and the lower ones."""
        return mix(mix(seed + offset) + ((attempt << 32) + position + 1) * step)

    @jit
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

    @jit
    def segment_end(ids: Any, start: Any, count: Any) -> Any:
        """The end of the listed tokens in the segment of the one at `start`."""
        segment, end = get_i32(ids + 4 * start) // segment_size, start + 1
        while end < count and get_i32(ids + 4 * end) // segment_size == segment:
            end += 1
        return end

    @jit
    def draw_listed(ids: Any, weights: Any, count: Any, word: Any) -> Any:
        """The place of a token of the list: first draws a segment of the vocabulary, then a token of it."""
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


def make_lists(dtype: str) -> tuple[Callable[..., Any], ...]:
    """Functions that make and shorten lists: values, ids and weights of tokens, in the order of ids."""
    from numpy import float32

    from nanovllm.cpu.kernels import vector_math as m
    from nanovllm.cpu.kernels import vectors as v

    load, load_part, size = v.WHOLE[dtype][0], v.PART[dtype][0], v.SIZES[dtype]
    splat, first_lanes, mul, sub = v.splat, v.first_lanes, v.mul, v.sub
    load_f32, store_f32, get_f32, set_f32 = v.load_f32, v.store_f32, v.get_f32, v.set_f32
    get_i32, set_i32 = v.get_i32, v.set_i32
    reaching, lowest_bit, count_reaching, exp2 = m.reaching, m.lowest_bit, m.count_reaching, m.exp2
    splat_int, total_int = m.splat_int, m.total_int
    float_of_bits, bits_of_float = m.float_of_bits, m.bits_of_float
    infinity, segment_size, first_key = float32(math.inf), SEGMENT, _FIRST_KEY

    @jit
    def load_logits(logits: Any, start: Any, vocab: Any) -> Any:
        """16 logits from `start` on; -inf past the end."""
        rest = vocab - start
        if rest >= 16:
            return load(logits + size * start)
        return first_lanes(load_part(logits + size * start, rest), splat(-infinity), rest)

    @jit
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

    @jit
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

    @jit
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

    @jit
    def keep_before(values: Any, ids: Any, weights: Any, count: Any, floor: Any, last: Any, ties: Any) -> Any:
        """Keep the tokens above `floor`, and those with this logit up to id `last`, at most `ties`
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

    @jit
    def keep_first(values: Any, ids: Any, weights: Any, count: Any, n: Any, best: Any) -> Any:
        """Keep the `n` largest, of equal ones those with the lowest ids."""
        floor, above = nth_largest(values, (count + 15) // 16, n, best), 0
        for i in range(count):
            above += get_f32(values + 4 * i) > floor
        return keep_before(values, ids, weights, count, floor, get_i32(ids + 4 * (count - 1)), n - above)

    @jit
    def weigh(values: Any, weights: Any, count: Any, best: Any, factor: Any) -> Any:
        """Write the weights of listed tokens."""
        for i in range((count + 15) // 16):
            x = load_f32(values + 64 * i)
            store_f32(weights + 64 * i, exp2(mul(sub(x, splat(best)), splat(factor))))

    return load_logits, find_first, nth_largest, list_from, keep_before, keep_first, weigh


def make_filtered(dtype: str) -> Callable[..., Any]:
    from numpy import float32

    from nanovllm.cpu.kernels import vectors as v

    get_f32, get_i32, size = v.get_f32, v.get_i32, v.SIZES[dtype]
    get = v.GET[dtype]
    random_word, _, draw_listed = make_random()
    _, _, nth_largest, list_from, keep_before, keep_first, weigh = make_lists(dtype)
    one, nothing, least = float32(1.0), float32(0.0), float32(_LEAST)

    @jit
    def total(weights: Any, count: Any) -> Any:
        whole = 0.0
        for i in range(count):
            whole += get_f32(weights + 4 * i)
        return whole

    @jit
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
