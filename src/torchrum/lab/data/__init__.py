"""Data sets on disk: where they live, how they are fetched and checked, and how they are read."""

from torchrum.lab.data.corpora import CORPORA, Corpus, DataFile, Source
from torchrum.lab.data.files import DataError, DataUnavailableError, data_root, read_files

__all__ = ["CORPORA", "Corpus", "DataError", "DataFile", "DataUnavailableError", "Source", "data_root", "read_files"]
