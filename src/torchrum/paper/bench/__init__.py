"""Timings of RUM beside the original implementation, nn.GRU and nn.LSTM: ``torchrum bench``."""
