"""From run folders and the ledger to figures."""
