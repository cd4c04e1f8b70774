"""The results ledger: one line of JSON per run, and the tables made from it."""

from torchrum.paper.ledger.record import record
from torchrum.paper.ledger.schema import Entry, LedgerError, read_ledger

__all__ = ["Entry", "LedgerError", "read_ledger", "record"]
