"""A linear head and its cross-entropy on a GPU: plain, and in pieces under ``Plan(techniques={"loss": "on"})``.

    make gpu PYTHON=python3                                              # among the rest
    python benchmarks/gpu_linear_cross_entropy.py --out docs/results     # the package installed

What is measured, and how, is that of `benchmarks/linear_cross_entropy.py`, with 16,384 tokens, in float32 and under
autocast to bfloat16 and float16. Takes under two minutes.
"""

from __future__ import annotations

import torch
from _gpu import arguments, is_possible, table, write
from linear_cross_entropy import COLUMNS, draw, errors, measure, row

CASES = ((32768, 768), (131072, 768))


def main() -> None:
    parser = arguments("Measure a linear head and its cross-entropy on a GPU.")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    if not is_possible(args):
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # On a CPU heads below a threshold, and float16, are computed plainly.
    cases, tokens, rounds = (((8192, 16),), 1024, 1) if args.dry_run else (CASES, 16384, args.rounds)
    dtypes = [torch.float32, torch.bfloat16, *([torch.float16] if device.type == "cuda" else [])]
    rows, runs = [], []
    for vocabulary, width in cases:
        error_float64, _ = errors(draw(vocabulary, width, 1024, device), torch.float64)
        for dtype in dtypes:
            run = measure(vocabulary, width, tokens, dtype, device, rounds)
            rows.append(row(run, error_float64))
            runs.append({**vars(run), "error_float64": error_float64})
            print(*rows[-1], flush=True)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    text = table([list(COLUMNS), *rows])
    print(f"\n{text}")
    write("linear-cross-entropy", args.out, {"runs": runs}, "A linear head and its cross-entropy, on", text)


if __name__ == "__main__":
    main()
