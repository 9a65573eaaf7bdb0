"""Distillation: a student learns the features of a frozen teacher (docs/training.md). `engine.train` is the story."""
