"""A quantized weight: its class, its companions (quant state, scales), and its compiled extension."""
