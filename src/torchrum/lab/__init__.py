"""Train and evaluate models: data, tasks, models, the training engine and its recipes (the ``train`` extra)."""
