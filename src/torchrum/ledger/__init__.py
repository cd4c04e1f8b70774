"""The results ledger: one small JSON file per run, and the tables made from them."""

from torchrum.ledger.record import record
from torchrum.ledger.schema import Entry, LedgerError, read_ledger
from torchrum.ledger.table import headline

__all__ = ["Entry", "LedgerError", "headline", "read_ledger", "record"]
