"""Programs around the library, each run as `python tools/NAME.py`, and what bench.py is made of."""
