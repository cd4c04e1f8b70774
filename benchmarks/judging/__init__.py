"""Reports of ``torchrum bench`` against our targets, and their errors against float64."""
