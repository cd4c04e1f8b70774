"""Data sets on disk: where they live, how they are fetched and checked, and how they are read."""

from torchrum.lab.data.files import CORPORA, Corpus, DataError, DataFile, DataUnavailableError, data_root, read_files

__all__ = ["CORPORA", "Corpus", "DataError", "DataFile", "DataUnavailableError", "data_root", "read_files"]
