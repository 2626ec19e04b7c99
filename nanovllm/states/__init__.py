"""States of layers that carry a state of fixed size from token to token in place of keys and values."""
