"""Video: the mask of a first frame follows its objects by frozen features (docs/video.md). Nothing is trained."""
