"""One self-contained HTML page from the ledger or from run folders."""
