"""The claims that speak of GPUs, measured on one: `lightning-accel claims` over their rows.

    make gpu PYTHON=python3                                   # among the rest
    python benchmarks/gpu_claims.py --out docs/results        # the package installed

Takes about four minutes.
"""

from __future__ import annotations

from _gpu import arguments, is_possible, write

from lightning_accel.claims.page import details, table
from lightning_accel.claims.record import measure_rows

ROWS = (1, 2, 4, 6, 7, 8, 9, 11, 13)
QUICK = (9, 13)


def main() -> None:
    args = arguments("Measure the claims that speak of GPUs.").parse_args()
    if not is_possible(args):
        return
    record = measure_rows(QUICK if args.dry_run else ROWS, lambda line: print(line, flush=True))
    text = f"{table([record])}\n\n{details([record])}"
    print(f"\n{text}")
    write("claims", args.out, {"record": record.to_dict()}, "The claims of the articles, on", text)


if __name__ == "__main__":
    main()
