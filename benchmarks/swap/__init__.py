"""The swap suite: everyday tasks on which ``nn.GRU`` is exchanged for ``RUM`` and nothing else is changed."""
