"""What a model is called in tables and figures."""

from torchrum.lab.training.config import ModelConfig

NAMES = {
    "lstm": "LSTM",
    "gru": "GRU",
    "ln_lstm": "LN-LSTM",
    "gru_tf": "GRU (TensorFlow)",
    "urnn": "uRNN",
    "full_urnn": "full-capacity uRNN",
    "soft_orthogonal": "soft orthogonality",
    "eunn": "EUNN",
    "goru": "GORU",
    "fast_weights": "FW-LN",
    "ntm": "NTM",
    "exprnn": "expRNN",
    "hyper_lstm": "HyperLSTM",
    "hm_lstm": "HM-LSTM",
    "nas": "NASCell",
    "rhn": "RHN",
    "memn2n": "MemN2N",
}


def model_label(model: ModelConfig) -> str:
    """The layer's name in print, with what tells its variants apart; several layers are counted before it."""
    if model.layer == "memn2n":  # its layers are hops over one memory
        return NAMES[model.layer]
    return (f"{model.num_layers} × " if model.num_layers > 1 else "") + _layer_label(model)


def _layer_label(model: ModelConfig) -> str:
    options = model.options
    if model.layer == "rum":
        norm = options.get("eta")
        eta = [] if norm is None else ["η=√H" if norm == "sqrt" else f"η={norm:g}"]
        return ", ".join([f"RUM λ={options.get('lam', 0):g}", *eta])
    if model.layer == "fs":
        slow, _, activation = options.get("slow", "lstm").partition("-")
        name = f"FS-{slow.upper()}-{options.get('num_fast', 2)}"
        if not activation:
            return name
        slim = (options.get("slow_size") or model.hidden_size) < model.hidden_size
        return f"{name} slim" if slim else f"{name} ({activation})"
    if model.layer == "ln_lstm" and not options.get("layer_norm", True):
        return "Zoneout LSTM" if options.get("zoneout") or options.get("zoneout_cell") else "LSTM (TensorFlow)"
    if model.layer == "goru" and options.get("style") == "fft":
        return "GORU (FFT)"
    if model.layer == "exprnn" and options.get("input_init") == "kaiming":
        return "expRNN (two rates)"
    return NAMES.get(model.layer, model.layer)
