"""What one unit does, checked on one rank and on several: each behaviour is a function that runs on every rank."""
