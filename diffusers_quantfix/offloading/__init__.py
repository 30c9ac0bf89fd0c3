"""Offloading hooks of accelerate and diffusers: find them, suspend them, and move the groups of group offloading."""
