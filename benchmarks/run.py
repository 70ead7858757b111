"""Runs all benchmarks and prints one table; exits with 1 if a target is missed."""

from __future__ import annotations

import sys

import audit_cost
import compare_speed
import estimate_speed
import help_speed
import measuring
import probe_cost
import record_size
import report_speed
import step_time


def main() -> int:
    parser = measuring.options(__doc__)
    parser.add_argument("--pairs", type=int, default=5, help="pairs of step time and probe cost")
    options = parser.parse_args()
    results = [help_speed.measure(), *compare_speed.measure(), *step_time.measure(pairs=options.pairs)]
    results += report_speed.measure()
    results += estimate_speed.measure()
    results += record_size.measure()
    results += audit_cost.measure()
    results += probe_cost.measure(pairs=options.pairs)
    return measuring.present(results, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
