"""Masks: which pixels belong to which thing, by queries that join the cores (docs/masks.md)."""

from veca.tasks.masks.task import Masks

TASK = Masks
