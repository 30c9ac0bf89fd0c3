"""Random programs over devices that take time, each beside a twin that is never moved.

    python -m tests.late                          # programs for a minute, from seed 0 on
    python -m tests.late --seed 17 --programs 1   # one again; what it does is printed
    python -m tests.late --minutes 30 --backend bnb-nf4
    python -m tests.late.table                    # hazards by backend and placement, without us and with us
    python -m pytest -m long tests/late           # a few, as in CI

A program loads a model, offloads it in groups on a stream, and then runs it, puts caches and a LoRA on and off, trains,
stops passes in the middle and reads the weights, in any order (`programs`). The twin does the same on one device. Every
output, gradient and weight must be the twin's, and nothing may be used that was not waited for (`tests.rig.late`). On a
machine with a GPU it is that GPU, whose streams are made late (`tests.rig.slow`): 62 programs on an H200 with torch
2.11, diffusers 0.42.1 and bitsandbytes 0.50.2 had no wrong tensor.
"""
