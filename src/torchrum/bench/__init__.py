"""Timings of RUM beside the authors' way, nn.GRU and nn.LSTM: ``torchrum bench``."""
