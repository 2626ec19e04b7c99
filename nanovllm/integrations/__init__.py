"""What other programs call: each file serves one of them and imports it; nothing imports the file."""
