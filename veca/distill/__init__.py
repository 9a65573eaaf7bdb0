"""Distillation: a student learns the features of a frozen teacher (DESIGN section 3). `engine.train` is the story."""
