"""Detection: a box and a class for every thing in a photo, by an RF-DETR on the patch features (docs/detect.md)."""

from veca.tasks.detect.task import Detect

TASK = Detect
