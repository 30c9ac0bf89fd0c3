"""One quantized weight: its companions (quant state, scales), its class, and the extension that runs it."""
