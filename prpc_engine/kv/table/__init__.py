"""One partition of a table in memory, and what a push does to it. No I/O: bytes and arrays in,
arrays out.

table                           pull and push
row_store, rows, index          where a key's row is
partition                       which partition a key is in
optimizer                       formulas
schedule                        their rates
gradients                       NaN and what overflows
initializer                     first values
storage                         what values are stored as
admission, eviction, decisions  which rows there are
replicated                      the same at a replica
changes                         which ones changed
compression                     what pushes look like on the wire
duplicates                      keys that come more than once
mix, spec, checks               hashing, settings by name, what may be passed
"""
