"""Programs around the library, each run as its first lines say, and what bench.py is made of."""
