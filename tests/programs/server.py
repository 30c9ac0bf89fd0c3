"""A server that holds one of two quantized pipelines at a time, and swaps them as requests come in from threads.

Argument: the folder of a Flux transformer.
"""
# needs: devices

import gc
import hashlib
import json
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from diffusers import BitsAndBytesConfig, FluxTransformer2DModel

from tests.rig import models

FOLDER = sys.argv[1]
CONFIGS = {"nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "int8": {"load_in_8bit": True}}
LOCK = threading.Lock()
HELD = {}
SWAPS = []


def evict():
    """Free the pipeline that is held, with the package's `release` where it is there."""
    name, pipe = HELD.popitem()
    SWAPS.append(name)
    package = sys.modules.get("diffusers_quantfix")
    if package is not None:
        package.release(pipe)
    del pipe
    gc.collect()


def pipeline(name):
    if name not in HELD:
        if HELD:
            evict()
        config = BitsAndBytesConfig(**CONFIGS[name])
        model = FluxTransformer2DModel.from_pretrained(
            FOLDER, quantization_config=config, torch_dtype=torch.bfloat16, device_map={"": "cuda:0"}
        )
        HELD[name] = models.flux_pipeline(model)
    return HELD[name]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        with LOCK:
            pipe = pipeline(self.path.strip("/"))
            latents = models.call_flux(pipe, device="cuda:0", dtype=torch.bfloat16).cpu()
        body = hashlib.sha256(latents.float().numpy().tobytes()).hexdigest().encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
server.daemon_threads = False  # server_close waits for the threads of the answers
threading.Thread(target=server.serve_forever, daemon=True).start()
answers = {"nf4": set(), "int8": set()}


def client(names):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for name in names:
        with opener.open(f"http://127.0.0.1:{server.server_port}/{name}", timeout=300) as response:
            answers[name].add(response.read().decode())


clients = [
    threading.Thread(target=client, args=(names,))
    for names in (["nf4", "int8", "nf4"], ["int8", "int8", "nf4"], ["nf4", "nf4", "int8"])
]
for thread in clients:
    thread.start()
for thread in clients:
    thread.join()
server.shutdown()
server.server_close()
evict()
print("RESULT", json.dumps({
    "answers": {name: sorted(found) for name, found in answers.items()},
    "swapped": len(SWAPS) > 1,
    "left on the device": torch.cuda.memory_allocated(0),
}))  # fmt: skip
