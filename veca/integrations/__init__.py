"""VECA inside other libraries: transformers, timm and the hub. Each is imported only when asked for."""

SIZE = 448  # pixels of the shorter side where nobody names another: whole patches of 14 and of 16
