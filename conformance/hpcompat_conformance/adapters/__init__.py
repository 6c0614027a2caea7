"""One small file for each implementation that the suite knows out of the box."""
