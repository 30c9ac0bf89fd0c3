"""Offloading hooks of accelerate and diffusers: what is offloaded, how to suspend it, what group offloading moves."""
