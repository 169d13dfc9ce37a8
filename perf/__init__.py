"""Benchmarks of this engine beside its peers and beside what the machine itself allows.

python -m perf.bench_ring | bench_rpc | bench_tensor | bench_kv   [--json] [--quick]
prpc bench ring|rpc|tensor|kv                                     the same
pytest perf                                                       the same code on tiny sizes: it works, not how fast

bench_*  ->  harness  ->  child, timing, machine        cli_bench  ->  bench_*, table, report
bench_*  ->  peers/   ->  child
"""
