"""Steps, norms and zeroing over sharded parameters: each behaviour is a function that runs on every rank."""
