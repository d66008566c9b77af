"""Benchmarks for airspeed velocity; `asv_bench/measure.py` runs them where there is no asv."""
