"""The demo's material: a small real model and two dozen everyday prompts."""
