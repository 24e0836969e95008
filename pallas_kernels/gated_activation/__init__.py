"""The activation of one half of each row times the other half: SwiGLU and GEGLU."""
