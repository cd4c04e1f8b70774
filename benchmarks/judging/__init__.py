"""Reports of ``torchrum bench`` against our targets, and beside the tests of the same machine."""
