"""What a model is called in tables and figures."""

from torchrum.training.config import ModelConfig

NAMES = {
    "rum": "RUM",
    "lstm": "LSTM",
    "gru": "GRU",
    "ln_lstm": "LN-LSTM",
    "urnn": "uRNN",
    "eunn": "EUNN",
    "goru": "GORU",
    "fast_weights": "FW-LN",
    "ntm": "NTM",
    "exprnn": "expRNN",
    "hyper_lstm": "HyperLSTM",
    "hm_lstm": "HM-LSTM",
    "nas": "NASCell",
    "rhn": "RHN",
}


def model_label(model: ModelConfig) -> str:
    """The layer's name in print; for RUM with the two numbers that tell its variants apart."""
    name = NAMES.get(model.layer, model.layer)
    if model.layer != "rum":
        return name
    numbers = {"lam": 0, **model.options}
    return ", ".join([f"{name} λ={numbers['lam']:g}", *([f"η={numbers['eta']:g}"] if numbers.get("eta") else [])])
