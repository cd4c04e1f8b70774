"""The results ledger: one small JSON file per run, and the tables made from them."""

from torchrum.paper.ledger.record import record
from torchrum.paper.ledger.schema import Entry, LedgerError, read_ledger
from torchrum.paper.ledger.table import headline

__all__ = ["Entry", "LedgerError", "headline", "read_ledger", "record"]
