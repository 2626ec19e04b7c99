"""Models for other programs: each file serves one program and imports it; nothing imports the file."""
