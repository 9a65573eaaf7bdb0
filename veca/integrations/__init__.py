"""VECA inside other libraries: transformers, timm and the hub. Each is imported only when asked for."""
