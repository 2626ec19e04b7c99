"""Models and functions for other programs: each file serves one of them, imports it, and nobody imports the file."""
