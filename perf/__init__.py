"""Benchmarks of this engine beside its peers and beside what the machine itself allows.

python -m perf.bench_SUBJECT [--json]  ring, shard: the engine; growth: its curves; rpc, start,
  [--quick]                            clients, connections, mixed, tls, failure: calls; tensor,
                                       transfer, fuse, kv, recovery: what stands on them
prpc bench SUBJECT                     the same
pytest perf                            the same code on tiny sizes: it works, not how fast

bench_*  ->  harness  ->  child, timing, machine        cli_bench  ->  bench_*, table, report, plot
cli_bench, report, table  ->  change                    cli_bench  ->  history_file  ->  change
bench_*  ->  peers/, limits  ->  child                  bench_shard, bench_growth  ->  in_shard
bench_tls  ->  bench_rpc, bench_tensor                  bench_transfer  ->  bench_tensor, published
bench_connections  ->  bench_clients, bench_shard
"""
