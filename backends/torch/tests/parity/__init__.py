"""hpcompat on torch against native FSDP2, and against single-process runs where native is wrong."""
