"""Every pipeline of the installed diffusers, tiny: quantized by every backend, in every placement.

The pipelines come from the release, their components from the constructors' signatures: ``configs`` holds what the
signatures do not tell, ``inputs`` what a call is given, ``families`` what cannot be built and why. ``subject`` saves
and loads one, ``placing`` places it, ``check`` compares its outputs.

    python -m tests.pipelines --family Flux --backend bnb-nf4
"""
