"""Offloading hooks of accelerate and diffusers: who is offloaded, how it is suspended, what group offloading moves."""
