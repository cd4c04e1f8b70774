"""Record, plot and report the reproduction: ledger, figures, report pages and benchmarks."""
