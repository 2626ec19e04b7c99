"""Prints the results of bench.py: readable lines, and at the end one line of JSON."""

from __future__ import annotations

import json
from typing import Any

from tools.benchmark.kernels import kernel_table
from tools.benchmark.roofline import Floor, broken_floor


def rounded(value: Any) -> Any:
    """Round all floats within `value` to five significant digits."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def report(result: dict[str, Any], floor: Floor) -> None:
    r = result
    tokens = f"{r['tokens_in']:,} tokens in, {r['tokens_out']:,} out"
    print(f"{r['engine']}, {r['workload']}: {tokens}; {r['device']}")
    print(f"start-up to first token   {r['startup_s']:8.2f} s, after {r['import_s']:.2f} s of imports")
    repeat = len(r["seconds"]) - 1
    print(f"generation                {r['median_s']:8.2f} s (median of {repeat} after one warm-up)")
    print(f"output                    {r['output_tokens_per_s']:8,.0f} tokens/s")
    best = r["floor_output_tokens_per_s"]
    reached = f"reached {r['share_of_floor']:.1%}"
    print(f"floor                     {best:8,.0f} tokens/s ({floor.total:.2f} s); {reached}")
    if r["floor_broken"]:
        shares = "; ".join(broken_floor(r))
        print(f"the floor is broken: {shares}. Measure the device again (python tools/measure_device.py)")
        print("and set its line of KNOWN_DEVICES in nanovllm/report/roofline.py")
    for name, p in r.get("phases", {}).items():
        rate = f"{p['tb_per_s']:.3g} TB/s" if name == "decode" else f"{p['tflops']:.3g} TFLOP/s"
        print(
            f"{name:8} {p['seconds']:8.3f} s {p['steps']:6,} steps {p['tokens_per_s']:10,.0f} tokens/s"
            f" {rate:>14}; {p['share_of_peak']:.1%} of the device's, {p['share_of_floor']:.1%} of the floor"
        )
    if "other_s" in r:
        print(f"other    {r['other_s']:8.3f} s before, between and after the steps")
    for size, t in r.get("steps", {}).items():
        print(f"decode step, batch {size:>4} {t['ms']:8.3f} ms, mean context {t['mean_context']:,.0f}")
    if "host" in r:
        h = r["host"]
        print(
            f"host time exposed {h['exposed_us']:8.0f} us of a step of {h['step_us']:,.0f} us at batch "
            f"{h['batch']} ({h['exposed_share']:.1%}; {h['profiled_exposed_share']:.1%} while profiled)"
        )
        print(f"gap between replays {h['replay_gap_us']:6.0f} us without a kernel, while profiled")
    for part, rows in r.get("kernels", {}).items():
        print(kernel_table(part, rows))
    print(json.dumps(rounded(r)))
