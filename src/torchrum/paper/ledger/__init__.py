"""The results ledger: one line of JSON per run, and the tables made from it."""

from torchrum.paper.ledger.entries import Entry, LedgerError, read_ledger, record

__all__ = ["Entry", "LedgerError", "read_ledger", "record"]
