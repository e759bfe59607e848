"""What would happen: numbers only. Nothing in here imports torch, so planning answers at once."""
