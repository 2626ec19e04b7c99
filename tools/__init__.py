"""Programs around the library, whose first lines say how to run them, and the parts of bench.py."""
