"""What the attention kernels of all backends must answer: problems, a float64 reference, checks."""
